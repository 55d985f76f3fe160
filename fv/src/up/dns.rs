//! `DNS =` of a wg-quick file: handed to `resolvconf`, which openresolv and systemd-resolved provide. Called by
//! `up` and undone by `undo`.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::process::{Command, ExitStatus, Stdio};

/// The lines that belong into resolv.conf.
pub(crate) fn text(servers: &[IpAddr], search: &[String]) -> String {
    let mut text = String::new();
    for server in servers {
        let _ = writeln!(text, "nameserver {server}");
    }
    if !search.is_empty() {
        let _ = writeln!(text, "search {}", search.join(" "));
    }
    text
}

/// What became of a wish to set DNS servers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The system asks these servers while the interface is there; [`unset`] takes it back.
    Set,
    /// There is no resolvconf: nothing was changed.
    NoTool,
}

/// Makes the servers of `text` the system's only ones.
///
/// # Errors
/// When `resolvconf` is there and fails.
pub(crate) fn set(interface: &str, text: &str) -> io::Result<Outcome> {
    set_with(Command::new("resolvconf"), interface, text)
}

fn set_with(mut tool: Command, interface: &str, text: &str) -> io::Result<Outcome> {
    // -m 0 -x: before all others, and exclusive, so that no query goes round the tunnel.
    let spawned = tool.args(["-a", &label(interface), "-m", "0", "-x"]).stdin(Stdio::piped()).spawn();
    let mut child = match spawned {
        Ok(child) => child,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Outcome::NoTool),
        Err(e) => return Err(e),
    };
    let written = child.stdin.take().map_or(Ok(()), |mut stdin| stdin.write_all(text.as_bytes()));
    done(child.wait()?)?;
    written.map(|()| Outcome::Set)
}

/// Takes back what [`set`] did.
///
/// # Errors
/// When `resolvconf` cannot be run or fails.
pub(crate) fn unset(interface: &str) -> io::Result<()> {
    done(Command::new("resolvconf").args(["-d", &label(interface), "-f"]).status()?)
}

fn done(status: ExitStatus) -> io::Result<()> {
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("resolvconf failed ({status})"))) }
}

/// Debian's resolvconf sorts by name: its list has a prefix (`tun.`) for what is to come first.
fn label(interface: &str) -> String {
    let order = fs::read_to_string("/etc/resolvconf/interface-order").unwrap_or_default();
    format!("{}{interface}", prefix(&order).map(|prefix| format!("{prefix}.")).unwrap_or_default())
}

fn prefix(order: &str) -> Option<&str> {
    order
        .lines()
        .filter_map(|line| line.strip_suffix('*'))
        .find(|name| !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines() -> String {
        let servers = ["10.0.0.1", "fd00::1"].map(|server| server.parse().unwrap());
        text(&servers, &["example.com".to_owned(), "lan".to_owned()])
    }

    #[test]
    fn resolvconf_gets_the_servers_and_the_search_list_and_its_failure_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let tool = dir.path().join("resolvconf");
        let script = |end: &str| {
            fs::write(&tool, format!("{{ echo \"$@\"; cat; }} > {}/log\n{end}\n", dir.path().display()))
                .unwrap();
            let mut command = Command::new("sh");
            command.arg(&tool);
            set_with(command, "wg7", &lines())
        };
        assert_eq!(script("exit 0").unwrap(), Outcome::Set);
        assert_eq!(
            fs::read_to_string(dir.path().join("log")).unwrap(),
            format!(
                "-a {} -m 0 -x\nnameserver 10.0.0.1\nnameserver fd00::1\nsearch example.com lan\n",
                label("wg7")
            )
        );
        assert!(script("exit 4").unwrap_err().to_string().contains("exit status: 4"));
    }

    #[test]
    fn without_resolvconf_nothing_is_claimed() {
        assert_eq!(set_with(Command::new("/nowhere/resolvconf"), "wg7", &lines()).unwrap(), Outcome::NoTool);
    }

    #[test]
    fn debians_first_plain_pattern_is_the_prefix() {
        assert_eq!(prefix("lo.inet6\nlo.!(pcsd*)\ntun*\neth*\n"), Some("tun"));
        assert_eq!(prefix("lo.inet\n*\n"), None);
    }
}
