//! Going on in the background, and telling those who wait that the tunnel is ready. Called by `main` and `run`.

use std::env;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::process::{Command, Stdio};

use nix::unistd::{dup2_stderr, dup2_stdout, setsid};

use crate::cli::Extras;
use crate::logger;

/// Starts this program again, in the background, for the interface `ifname`, and waits until that one is ready.
///
/// # Errors
/// A sentence for the user; it is empty when the other process has said on standard error what is wrong.
pub(crate) fn start(ifname: &str, extras: &Extras) -> Result<(), String> {
    let failed = |e: io::Error| format!("cannot go on in the background: {e}; --foreground may help");
    let program = env::current_exe().map_err(failed)?;
    let mut child = Command::new(program)
        .arg("--in-background")
        .args(extras.words())
        .args(["--", ifname])
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let mut ready = [0];
    let read = child.stdout.take().map(|mut pipe| pipe.read_exact(&mut ready));
    if matches!(read, Some(Ok(()))) {
        return Ok(());
    }
    let status = child.wait().map_err(failed)?;
    // With a status of its own it has said why; a signal says nothing.
    Err(status
        .code()
        .map_or_else(|| format!("the process in the background ended early ({status})"), |_| String::new()))
}

/// First thing in the background process: leave the terminal, whose signals are no longer for us.
pub(crate) fn leave_terminal() {
    // Fails only for a process that leads a session already, which is what is wanted.
    let _ = setsid();
}

/// Tells the process that waits in [`start`] that all is set up, and lets go of its output. Standard error is
/// kept when a log was asked for.
///
/// # Errors
/// When nobody waits any more.
pub(crate) fn tell_parent() -> io::Result<()> {
    let mut out = io::stdout();
    out.write_all(b"+")?;
    out.flush()?;
    let null = File::options().read(true).write(true).open("/dev/null")?;
    dup2_stdout(&null)?;
    if !logger::asked_for() {
        dup2_stderr(&null)?;
    }
    Ok(())
}

/// Tells systemd, when it started us with Type=notify. Nobody else has to listen.
pub(crate) fn tell_systemd() {
    let Some(path) = env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    if let Err(e) = notify(&path) {
        log::warn!("cannot tell NOTIFY_SOCKET that the tunnel is ready: {e}");
    }
}

fn notify(path: &std::ffi::OsStr) -> io::Result<()> {
    let address = match path.as_encoded_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(path)?,
    };
    let message = format!("READY=1\nMAINPID={}", std::process::id());
    UnixDatagram::unbound()?.send_to_addr(message.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn systemd_is_told_on_a_socket_with_a_path_and_on_one_without() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("notify");
        let listener = UnixDatagram::bind(&path).expect("bound");
        notify(path.as_os_str()).expect("sent");
        let name = format!("fv-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("an address");
        let nameless = UnixDatagram::bind_addr(&address).expect("bound");
        notify(format!("@{name}").as_ref()).expect("sent");
        for socket in [listener, nameless] {
            let mut buffer = [0; 64];
            let length = socket.recv(&mut buffer).expect("received");
            assert!(buffer[..length].starts_with(b"READY=1\nMAINPID="));
        }
    }
}
