//! PreUp, PostUp, PreDown and PostDown: the commands of a wg-quick file. Called by `up`.

use std::fmt;
use std::io;
use std::path::Path;
use std::process::{Command, ExitStatus};

use crate::config::Hook;

/// wg-quick promises bash, so that is tried first; most lines need no more than any shell.
const SHELLS: [&str; 3] = ["/bin/bash", "/usr/bin/bash", "/bin/sh"];

/// Why a hook did not do its work.
#[derive(Debug)]
pub(crate) enum Error {
    /// This system has no shell.
    NoShell { key: &'static str, line: usize },
    /// The shell could not be started.
    NotStarted { key: &'static str, line: usize, source: io::Error },
    /// The command ended with something else than success.
    Failed { key: &'static str, line: usize, status: ExitStatus },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoShell { key, line } => write!(
                f,
                "line {line}: {key} needs a shell, and this system has none; remove the line, or do its work \
                 before and after fv"
            ),
            Self::NotStarted { key, line, source } => {
                write!(f, "line {line}: {key} could not be started: {source}")
            }
            Self::Failed { key, line, status } => write!(f, "line {line}: {key} failed ({status})"),
        }
    }
}

impl std::error::Error for Error {}

/// Says which line cannot be run here, before anything is touched.
pub(crate) fn check<'a>(hooks: impl IntoIterator<Item = &'a Hook>) -> Result<(), Error> {
    match (hooks.into_iter().next(), shell(&SHELLS)) {
        (Some(hook), None) => Err(Error::NoShell { key: hook.key, line: hook.line }),
        _ => Ok(()),
    }
}

/// Runs one command to its end, as wg-quick does: printed first, output and input are ours.
pub(crate) fn run(hook: &Hook, interface: &str) -> Result<(), Error> {
    run_with(shell(&SHELLS), hook, interface)
}

fn run_with(shell: Option<&str>, hook: &Hook, interface: &str) -> Result<(), Error> {
    let (key, line) = (hook.key, hook.line);
    let shell = shell.ok_or(Error::NoShell { key, line })?;
    let command = hook.command.replace("%i", interface);
    log::info!("{key}: {command}");
    let status = Command::new(shell).args(["-c", &command]).status().map_err(|source| Error::NotStarted {
        key,
        line,
        source,
    })?;
    if status.success() { Ok(()) } else { Err(Error::Failed { key, line, status }) }
}

fn shell<'a>(shells: &[&'a str]) -> Option<&'a str> {
    shells.iter().copied().find(|shell| Path::new(shell).exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hook(command: &str) -> Hook {
        Hook { key: "PostUp", line: 7, command: command.to_owned() }
    }

    #[test]
    fn the_interface_name_is_put_in_everywhere() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().display();
        run(&hook(&format!("echo %i and %i > {path}")), "wg7").unwrap();
        assert_eq!(std::fs::read_to_string(file.path()).unwrap(), "wg7 and wg7\n");
    }

    #[test]
    fn a_failing_command_is_told_with_its_line_and_status() {
        let error = run(&hook("exit 3"), "wg7").unwrap_err();
        assert_eq!(error.to_string(), "line 7: PostUp failed (exit status: 3)");
    }

    #[test]
    fn without_a_shell_the_line_is_named() {
        let error = run_with(shell(&["/nowhere/sh"]), &hook("true"), "wg7").unwrap_err();
        assert!(error.to_string().starts_with("line 7: PostUp needs a shell"), "{error}");
        let error = run_with(Some("/nowhere/sh"), &hook("true"), "wg7").unwrap_err();
        assert!(error.to_string().starts_with("line 7: PostUp could not be started"), "{error}");
    }
}
