//! `fv doctor`: what this machine gives a tunnel, and what a running one has in use, what it counted, and what looks
//! wrong. Called by `main`; `tunnel` tells by `report` what `fv doctor IFNAME` asks.

mod advice;
mod equipment;
mod finding;
mod machine;
pub(crate) mod report;
mod running;

use std::io::{self, Write};
use std::path::Path;

use forestvpn_quantum::io::{Offloads, SocketBuffers};

pub(crate) use equipment::small_buffers;

/// What FV_NO_OFFLOAD leaves on, and FV_OFFLOAD puts on top.
///
/// # Errors
/// A word in it is not known.
pub(crate) fn switched() -> Result<Offloads, String> {
    let list = std::env::var("FV_NO_OFFLOAD").unwrap_or_default();
    let more = std::env::var("FV_OFFLOAD").unwrap_or_default();
    let wanted = Offloads::default().with(&more).map_err(|e| format!("FV_OFFLOAD: {e}"))?;
    wanted.without(&list).map_err(|e| format!("FV_NO_OFFLOAD: {e}"))
}

/// Looks at this machine, or asks the `fv` behind the control socket of `ifname` in `directory`.
///
/// # Errors
/// No tunnel can run here (then the text is empty: all is said already), or nobody answers.
pub(crate) fn run(directory: &Path, ifname: Option<&str>, json: bool) -> Result<(), String> {
    let Some(ifname) = ifname else {
        let machine = machine::look(switched()?, &crate::show::names(directory).unwrap_or_default());
        print(&if json { machine.as_json()? } else { machine.as_text() })?;
        return if machine.can_run() { Ok(()) } else { Err(String::new()) };
    };
    let running = running::ask(directory, ifname)?;
    print(&if json { running.as_json()? } else { running.as_text() })
}

fn print(text: &str) -> Result<(), String> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(format!("cannot write: {e}")),
        _ => Ok(()),
    }
}

/// Bytes as buffers are counted.
fn kib(bytes: usize) -> String {
    format!("{} KiB", bytes / 1024)
}

const WANTED: SocketBuffers = SocketBuffers::WANTED;
