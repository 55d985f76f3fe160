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

/// Watches the interface of a TUN device. Holds a copy of the descriptor: the device lives at least as long.
#[derive(Debug)]
pub struct Link {
    tun: OwnedFd,
    sight: Option<Sight>,
}

/// Sockets in the namespace of the interface.
#[derive(Debug)]
struct Sight {
    namespace: Option<(u64, u64)>,
    query: UnixDatagram,
    events: Option<File>,
}

impl Link {
    /// Watches the interface of `tun`.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn new(tun: &Tun) -> io::Result<Self> {
        Ok(Self { tun: tun.as_fd().try_clone_to_owned()?, sight: None })
    }

    /// Asks the kernel. `None`: the interface was deleted.
    ///
    /// # Errors
    /// The interface is there, but cannot be seen: it moved to a namespace that this process may not enter
    /// (that takes CAP_SYS_ADMIN), or descriptors ran out. What was known last is the best guess.
    pub fn status(&mut self) -> io::Result<Option<LinkStatus>> {
        // Between asking for the name and using it the interface may be renamed, moved or deleted.
        for _ in 0..3 {
            match self.look() {
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
        // Kernels before 5.2 cannot tell, others only to CAP_NET_ADMIN: then it is looked for here.
        let theirs = fd::tun_namespace(self.tun.as_fd()).ok();
        let their_id = theirs.as_ref().and_then(|fd| id(fd.as_fd()));
        let our_id = File::open("/proc/thread-self/ns/net").ok().and_then(|f| id(f.as_fd()));
        let here = their_id.is_none() || their_id == our_id;

        if self.sight.as_ref().is_none_or(|s| s.namespace != their_id) {
            let fresh = match &theirs {
                Some(netns) if !here => Sight::abroad(netns.as_fd(), their_id)?,
                _ => Sight::open(their_id)?,
            };
            self.sight = Some(fresh);
        }
        let Some(sight) = &self.sight else { return Err(io::ErrorKind::NotFound.into()) };
        let ask = |call| {
            let mut req = IfReq::new(&name);
            req.call(sight.query.as_fd(), call).map(|()| req)
        };
        let up = ask(IfCall::Flags)?.flags() & libc::IFF_UP as u16 != 0;
        let mtu = u32::try_from(ask(IfCall::Mtu)?.int()).unwrap_or(0);
        let ifindex = u32::try_from(ask(IfCall::Index)?.int()).unwrap_or(0);
        Ok(LinkStatus { name, ifindex, mtu, up, here })
    }

    /// Waits until something may have changed, at most `longest`. Then ask [`Link::status`] again.
    ///
    /// # Errors
    /// None known.
    pub fn wait(&mut self, longest: Duration) -> io::Result<()> {
        let events = self.sight.as_ref().and_then(|s| s.events.as_ref());
        fd::wait_either(events.map(AsFd::as_fd), self.tun.as_fd(), longest)?;
        if let Some(mut events) = events {
            // What changed is asked for elsewhere; here it only must not be reported again. The socket is
            // non-blocking; should it have overflowed, the error is taken off by one read as well.
            let mut buf = [0; 4096];
            while events.read(&mut buf).is_ok() {}
        }
        Ok(())
    }
}

impl Sight {
    fn open(namespace: Option<(u64, u64)>) -> io::Result<Self> {
        // Without the events the interface is only looked at as often as the caller asks.
        Ok(Self {
            namespace,
            query: UnixDatagram::unbound()?,
            events: fd::link_events().ok().map(File::from),
        })
    }

    /// A socket belongs for life to the namespace of the thread that made it; so a short-lived thread goes
    /// there, and this one does not.
    fn abroad(netns: BorrowedFd<'_>, namespace: Option<(u64, u64)>) -> io::Result<Self> {
        std::thread::scope(|scope| {
            let visit = || fd::enter_namespace(netns).and_then(|()| Self::open(namespace));
            let thread = std::thread::Builder::new().name("netns".to_owned()).spawn_scoped(scope, visit)?;
            thread.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
        })
    }
}

fn id(fd: BorrowedFd<'_>) -> Option<(u64, u64)> {
    let meta = File::from(fd.try_clone_to_owned().ok()?).metadata().ok()?;
    Some((meta.dev(), meta.ino()))
}
