//! What became of the interface behind a TUN descriptor: its name, MTU, whether it is up, whether it is still
//! there at all.
//!
//! `fv`'s control thread keeps a [`Link`] and tells the worker. Asked through the descriptor and not by name,
//! because an interface may be renamed, and may move to another network namespace, where it is out of sight
//! of the sockets of this process while its descriptor keeps working.
#![expect(clippy::disallowed_methods, reason = "asks the kernel about the interface, from a control thread")]

use std::fs::File;
use std::io;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use super::device_gone;
use super::fd::{self, IfCall, IfReq};
use super::tun::Tun;

/// An interface as it was when asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkStatus {
    /// Its name now.
    pub name: String,
    /// Its index in the namespace it is in.
    pub ifindex: u32,
    /// Largest packet in bytes.
    pub mtu: u32,
    /// Administratively up.
    pub up: bool,
    /// In the network namespace of the thread that asked.
    pub here: bool,
}

/// How often an interface in another namespace is looked at: no events come from there, but that it is up.
const ABROAD: Duration = Duration::from_secs(1);

/// Watches the interface of a TUN device. Holds a copy of the descriptor: the device lives at least as long.
#[derive(Debug)]
pub struct Link {
    tun: OwnedFd,
    /// Readable when an interface in this namespace changed; only while ours is here.
    events: Option<File>,
    abroad: bool,
    /// It was down when it was last seen. Its descriptor can be written to from the moment on that it is up,
    /// and says so to `poll` wherever the interface is.
    down: bool,
    /// The kernel has told the namespace before, so it can.
    told: bool,
}

impl Link {
    /// Watches the interface of `tun`.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn new(tun: &Tun) -> io::Result<Self> {
        // Without the events the interface is only looked at as often as the caller asks.
        let events = fd::link_events().ok().map(File::from);
        Ok(Self { tun: tun.as_fd().try_clone_to_owned()?, events, abroad: false, down: false, told: false })
    }

    /// Asks the kernel. `None`: the interface was deleted.
    ///
    /// # Errors
    /// The interface is there, but cannot be seen: it moved to a namespace that this process may not enter
    /// (that takes CAP_SYS_ADMIN), it is on its way from one to another or on its way out, or descriptors ran
    /// out. What was known last is the best guess until it is asked for again.
    pub fn status(&mut self) -> io::Result<Option<LinkStatus>> {
        // Between asking for the name and using it the interface may be renamed, moved or deleted.
        for _ in 0..3 {
            let seen = self.look();
            // An unseen one may be up already: waiting for that would not wait at all.
            self.down = seen.as_ref().is_ok_and(|now| !now.up);
            match seen {
                Err(e) if e.raw_os_error() == Some(libc::ENODEV) => {}
                Err(e) if device_gone(&e) => return Ok(None),
                other => return other.map(Some),
            }
        }
        Err(io::Error::from_raw_os_error(libc::ENODEV))
    }

    fn look(&mut self) -> io::Result<LinkStatus> {
        let mut req = IfReq::new("");
        req.call(self.tun.as_fd(), IfCall::TunQuery)?;
        let name = req.name();
        let theirs = match fd::tun_namespace(self.tun.as_fd()) {
            Ok(netns) => Some(netns),
            // A namespace on its way out. By name another interface might be found here.
            Err(_) if self.told => return Err(io::Error::from_raw_os_error(libc::ENODEV)),
            // Kernels before 5.2 cannot tell, others only to CAP_NET_ADMIN: then it is looked for here.
            Err(_) => None,
        };
        self.told |= theirs.is_some();
        let their_id = theirs.as_ref().and_then(|fd| id(fd.as_fd()));
        let our_id = File::open("/proc/thread-self/ns/net").ok().and_then(|f| id(f.as_fd()));
        match theirs {
            Some(netns) if their_id != our_id => {
                self.abroad = true;
                visit(netns.as_fd(), || ask(name, false))
            }
            _ => {
                self.abroad = false;
                ask(name, true)
            }
        }
    }

    /// Waits until something may have changed, at most `longest`. Then ask [`Link::status`] again.
    ///
    /// # Errors
    /// None known.
    pub fn wait(&mut self, longest: Duration) -> io::Result<()> {
        let longest = if self.abroad { longest.min(ABROAD) } else { longest };
        fd::wait_either(self.events.as_ref().map(AsFd::as_fd), self.tun.as_fd(), self.down, longest)?;
        if let Some(events) = &mut self.events {
            // What changed is asked for elsewhere; here it only must not be reported again. The socket is
            // non-blocking; should it have overflowed, the error is taken off by one read as well.
            let mut buf = [0; 4096];
            while events.read(&mut buf).is_ok() {}
        }
        Ok(())
    }
}

/// Asks in the namespace of the calling thread.
fn ask(name: String, here: bool) -> io::Result<LinkStatus> {
    // Any socket will do.
    let socket = UnixDatagram::unbound()?;
    let call = |call| {
        let mut req = IfReq::new(&name);
        req.call(socket.as_fd(), call).map(|()| req)
    };
    let up = call(IfCall::Flags)?.flags() & libc::IFF_UP as u16 != 0;
    let mtu = u32::try_from(call(IfCall::Mtu)?.int()).unwrap_or(0);
    let ifindex = u32::try_from(call(IfCall::Index)?.int()).unwrap_or(0);
    Ok(LinkStatus { name, ifindex, mtu, up, here })
}

/// Runs `work` on a short-lived thread that goes to another namespace. Nothing is left open there: a socket
/// would keep that namespace, and the interface in it, alive after everybody else has left.
fn visit<R: Send>(netns: BorrowedFd<'_>, work: impl FnOnce() -> io::Result<R> + Send) -> io::Result<R> {
    std::thread::scope(|scope| {
        let there = || fd::enter_namespace(netns).and_then(|()| work());
        let thread = std::thread::Builder::new().name("netns".to_owned()).spawn_scoped(scope, there)?;
        thread.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
    })
}

fn id(fd: BorrowedFd<'_>) -> Option<(u64, u64)> {
    let meta = File::from(fd.try_clone_to_owned().ok()?).metadata().ok()?;
    Some((meta.dev(), meta.ino()))
}

#[cfg(test)]
mod tests {
    use std::time::Instant as Clock;

    use super::*;
    use crate::io::namespace::{in_namespace, run};

    fn status(link: &mut Link) -> LinkStatus {
        link.status().unwrap().unwrap()
    }

    /// Until `done`, or 5 s.
    fn follow(link: &mut Link, done: impl Fn(Option<&LinkStatus>) -> bool) {
        let start = Clock::now();
        // An error is what is seen in the midst of a change.
        while !link.status().is_ok_and(|now| done(now.as_ref())) {
            assert!(start.elapsed() < Duration::from_secs(5), "no change was seen");
            link.wait(Duration::from_secs(60)).unwrap();
        }
    }

    #[test]
    fn changes_of_the_interface_are_seen_as_they_happen() {
        in_namespace(|| {
            let tun = Tun::open("fvl0").unwrap();
            let mut link = Link::new(&tun).unwrap();
            let first = status(&mut link);
            assert_eq!((first.name.as_str(), first.mtu, first.up, first.here), ("fvl0", 1500, false, true));
            run("ip link set fvl0 mtu 1420 up");
            follow(&mut link, |now| now.is_some_and(|now| now.up && now.mtu == 1420));
            run("ip link set fvl0 down");
            run("ip link set fvl0 name other");
            follow(&mut link, |now| now.is_some_and(|now| !now.up && now.name == "other"));
            assert_eq!(status(&mut link).ifindex, first.ifindex);
            run("ip link delete other");
            follow(&mut link, |now| now.is_none());
        });
    }

    #[test]
    fn interface_that_moved_to_another_namespace_is_followed_there() {
        in_namespace(|| {
            let tun = Tun::open("fvl0").unwrap();
            let mut link = Link::new(&tun).unwrap();
            assert!(status(&mut link).here);
            let (tell, told) = std::sync::mpsc::channel();
            let (mtus, wanted) = std::sync::mpsc::channel::<u32>();
            let elsewhere = std::thread::spawn(move || {
                fd::leave_namespace().unwrap();
                let me = std::fs::read_link("/proc/thread-self").unwrap();
                tell.send(me.file_name().unwrap().to_str().unwrap().to_owned()).unwrap();
                for mtu in wanted {
                    run(&format!("ip link set fvl0 mtu {mtu} up"));
                }
            });
            run(&format!("ip link set fvl0 netns {}", told.recv().unwrap()));
            follow(&mut link, |now| now.is_some_and(|now| !now.here));
            let start = Clock::now();
            mtus.send(1300).unwrap();
            follow(&mut link, |now| now.is_some_and(|now| now.up && now.mtu == 1300));
            assert!(start.elapsed() < ABROAD * 7 / 10, "only the regular look saw that it is up");
            drop(mtus);
            elsewhere.join().unwrap();
            // The namespace went, and the interface with it.
            follow(&mut link, |now| now.is_none());
        });
    }
}
