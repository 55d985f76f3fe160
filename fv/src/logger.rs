//! Where log lines go: standard error, one short line each. How much is said is set by LOG_LEVEL.

use std::io::Write;
use std::sync::OnceLock;

use log::{LevelFilter, Log, Metadata, Record};

struct Stderr {
    prefix: OnceLock<String>,
}

static STDERR: Stderr = Stderr { prefix: OnceLock::new() };

impl Log for Stderr {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            let prefix = self.prefix.get().map_or("fv", String::as_str);
            let level = record.level().as_str().to_ascii_lowercase();
            // In one write, so that lines of several threads do not mix. Nobody is left to tell of a failure.
            let _ = std::io::stderr().write_all(format!("{prefix}: {level}: {}\n", record.args()).as_bytes());
        }
    }

    fn flush(&self) {}
}

/// Starts logging for one interface (or for the program, when `ifname` is empty), as loud as the environment
/// asks for: LOG_LEVEL, or WG_LOG_LEVEL when that is not set.
pub(crate) fn start(ifname: &str) {
    let prefix = if ifname.is_empty() { "fv".to_owned() } else { format!("fv {ifname}") };
    // Both fail only when they were done before; the first call counts.
    let _ = STDERR.prefix.set(prefix);
    let _ = log::set_logger(&STDERR);
    log::set_max_level(LevelFilter::Warn);
    let Some(word) = wanted() else {
        return;
    };
    match level(&word) {
        Some(level) => log::set_max_level(level),
        None => {
            let word = crate::uapi::shown(&word);
            log::warn!("LOG_LEVEL={word} is not known (silent, error, debug, verbose); taken as error");
        }
    }
}

/// For a program in the foreground with a person before it: says what it does, unless the environment has asked
/// for another loudness.
pub(crate) fn talk() {
    if wanted().is_none() {
        log::set_max_level(LevelFilter::Info);
    }
}

/// Whether a process in the background is to keep its standard error: someone asked for a log.
pub(crate) fn asked_for() -> bool {
    wanted().is_some() && log::max_level() != LevelFilter::Off
}

fn wanted() -> Option<String> {
    ["LOG_LEVEL", "WG_LOG_LEVEL"]
        .iter()
        .find_map(|name| std::env::var(name).ok())
        .filter(|word| !word.is_empty())
}

/// wireguard-go's words, and those of boringtun and of many other programs.
fn level(word: &str) -> Option<LevelFilter> {
    Some(match word.to_ascii_lowercase().as_str() {
        "silent" | "off" => LevelFilter::Off,
        "error" | "warn" | "warning" => LevelFilter::Warn,
        "info" => LevelFilter::Info,
        "debug" | "verbose" => LevelFilter::Debug,
        "trace" => LevelFilter::Trace,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_wireguard_go_set_the_level_in_any_case() {
        for (word, expected) in [
            ("silent", LevelFilter::Off),
            ("error", LevelFilter::Warn),
            ("debug", LevelFilter::Debug),
            ("VERBOSE", LevelFilter::Debug),
        ] {
            assert_eq!(level(word), Some(expected));
        }
        assert_eq!(level("loud"), None);
    }
}
