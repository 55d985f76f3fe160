//! Tests that need a network of their own: each runs on a thread in a fresh network namespace, which goes with
//! it. Without the privilege, or without iproute2, they are skipped, or fail where `FV_NO_SKIP` is set.

use std::process::Command;

use super::fd;

/// Says that something is not tested here, and why.
pub(crate) fn skip(what: &str) {
    assert!(std::env::var_os("FV_NO_SKIP").is_none(), "skipping is forbidden (FV_NO_SKIP): {what}");
    eprintln!("skipped: {what}");
}

/// Runs `test` in an empty namespace whose loopback is up.
pub(crate) fn in_namespace(test: impl FnOnce() + Send + 'static) {
    let thread = std::thread::spawn(|| {
        if let Err(e) = fd::leave_namespace() {
            return skip(&format!("no network namespace ({e}); run as root"));
        }
        if Command::new("ip").arg("-V").output().is_err() {
            return skip("the program ip is missing; install iproute2");
        }
        run("ip link set lo up");
        test();
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Runs a command in the namespace of this thread; it must succeed.
pub(crate) fn run(line: &str) {
    let mut words = line.split_whitespace();
    let output = Command::new(words.next().unwrap()).args(words).output().unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
}
