//! Network namespaces: a network of one's own, for the demo's two ends and for tests that must not touch the
//! machine's network.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::thread;

use nix::sched::{CloneFlags, setns, unshare};

use crate::netlink::Netlink;

/// A network namespace; it lives as long as this handle, a process in it, or an interface reaching into it.
#[derive(Debug)]
pub(crate) struct Namespace(File);

impl Namespace {
    /// Makes a new, empty namespace whose loopback is up. The calling thread stays where it is.
    ///
    /// # Errors
    /// `EPERM` without CAP_SYS_ADMIN (a user namespace gives it), `ENOSPC` when the machine's limit is reached.
    pub(crate) fn new() -> io::Result<Self> {
        // Only threads can change their namespace, so one is spent on it.
        let make = || {
            unshare(CloneFlags::CLONE_NEWNET)?;
            let mut netlink = Netlink::open().map_err(io::Error::other)?;
            if let Some(lo) = netlink.link("lo").map_err(io::Error::other)? {
                netlink.set_up(lo.index, true).map_err(io::Error::other)?;
            }
            File::open("/proc/thread-self/ns/net").map(Self)
        };
        thread::scope(|scope| scope.spawn(make).join())
            .unwrap_or_else(|_| Err(io::Error::other("it crashed")))
    }

    /// Runs `work` on a thread that is in this namespace: sockets it opens and processes it starts belong here.
    ///
    /// # Errors
    /// When the namespace cannot be entered, or when `work` panicked.
    pub(crate) fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> io::Result<R> {
        let inside = || {
            setns(&self.0, CloneFlags::CLONE_NEWNET)?;
            Ok(work())
        };
        thread::scope(|scope| scope.spawn(inside).join())
            .unwrap_or_else(|_| Err(io::Error::other("it crashed")))
    }
}

impl AsFd for Namespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// For tests: runs `test` in a namespace of its own, so that parallel tests cannot meet. Skips with a printed
/// reason where that is not allowed, and fails instead when FV_NO_SKIP is set.
#[cfg(test)]
pub(crate) fn alone(test: impl FnOnce() + Send) {
    let namespace = match Namespace::new() {
        Ok(namespace) => namespace,
        Err(e) if std::env::var_os("FV_NO_SKIP").is_none() => {
            eprintln!("SKIPPED: cannot make a network namespace ({e}); run the tests as root");
            return;
        }
        Err(e) => panic!("cannot make a network namespace: {e}"),
    };
    let inside = || {
        setns(&namespace.0, CloneFlags::CLONE_NEWNET).expect("the namespace can be entered");
        test();
    };
    // The panic of a failed assertion has to come through with its message.
    if let Err(panic) = thread::scope(|scope| scope.spawn(inside).join()) {
        std::panic::resume_unwind(panic);
    }
}
