//! The TUN device: opening it, and one queue of packets.
//!
//! `fv` opens it before it goes to the background, so that every failure can still be told; the worker then
//! owns the queue. What the interface is called and whether it is up is `link`'s business.
//!
//! The descriptor is opened here and not by the `tun` crate (0.8): that has no `IFF_TUN_EXCL`, so it would
//! silently join a device of the same name that somebody left behind, and it resets neither the offload mask nor
//! the virtio header size, which belong to the device and outlive whoever set them. What an interface needs
//! beside packets is the crate's business: it is handed the descriptor.

use std::ffi::CStr;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use socket2::SockRef;
use tun::AbstractDevice;

use rustix::io::{self as raw, Errno};

use super::fd::{self, IfCall, IfReq};
use super::{Offloads, Poller, Queue, TunCaps, TunQueue};
use crate::offload::VnetHdr;

const NODE: &str = "/dev/net/tun";
const NODE_C: &CStr = c"/dev/net/tun";
/// Longest interface name in bytes.
pub const MAX_NAME: usize = libc::IFNAMSIZ - 1;
/// Most pieces of one write: a header and 64 segments.
const MAX_PARTS: usize = 66;

/// `TUN_F_` bits of linux/if_tun.h: checksums may be missing; TCP over IPv4 and IPv6 may come as super-packets;
/// so may UDP, from Linux 6.2 on, and only both families at once. TSO_ECN is left out: then the kernel itself
/// cuts what carries CWR.
const CSUM: libc::c_uint = 0x01;
const TSO: libc::c_uint = 0x02 | 0x04;
const USO: libc::c_uint = 0x20 | 0x40;

const TUN: u16 = (libc::IFF_TUN | libc::IFF_NO_PI) as u16;
const VNET: u16 = libc::IFF_VNET_HDR as u16;
const MULTI: u16 = libc::IFF_MULTI_QUEUE as u16;
const DETACH: u16 = libc::IFF_DETACH_QUEUE as u16;
const EXCLUSIVE: u16 = libc::IFF_TUN_EXCL as u16;

/// Why there is no TUN device.
#[derive(Debug)]
#[non_exhaustive]
pub enum TunError {
    /// No interface can have this name.
    BadName {
        /// The name.
        name: String,
    },
    /// `/dev/net/tun` does not exist and could not be made.
    NoNode,
    /// `/dev/net/tun` exists, but may not be opened.
    NodeDenied,
    /// `/dev/net/tun` exists, but the kernel has no TUN driver behind it.
    NoDriver,
    /// Interfaces may not be created or joined.
    NotPermitted {
        /// The name.
        name: String,
    },
    /// Another program has an interface of this name.
    Taken {
        /// The name.
        name: String,
    },
    /// An interface of this name exists and is no TUN device that can be joined.
    NotTun {
        /// The name.
        name: String,
    },
    /// The descriptor that was handed over is not what it should be.
    BadFd {
        /// What it lacks.
        reason: &'static str,
    },
    /// Anything else.
    Os {
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

impl fmt::Display for TunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadName { name } => write!(
                f,
                "\"{}\" cannot name an interface: 1 to {MAX_NAME} bytes, no '/', ':' or blanks, not \".\" or \"..\"",
                name.escape_debug()
            ),
            Self::NoNode => f.write_str(
                "/dev/net/tun does not exist and could not be made; load the kernel's tun module \
                 (modprobe tun), or start the container with --device /dev/net/tun",
            ),
            Self::NodeDenied => f.write_str(
                "/dev/net/tun may not be opened; run as root, \
                 or start the container with --device /dev/net/tun",
            ),
            Self::NoDriver => f.write_str(
                "the kernel has no TUN driver behind /dev/net/tun; load it (modprobe tun), \
                 in a container on the host",
            ),
            Self::NotPermitted { name } => write!(
                f,
                "may not create the interface {name}: CAP_NET_ADMIN is missing; run as root, \
                 or start the container with --cap-add NET_ADMIN"
            ),
            Self::Taken { name } => write!(
                f,
                "the interface {name} is in use by another program; choose another name, or stop that program"
            ),
            Self::NotTun { name } => write!(
                f,
                "an interface {name} exists and is not a single-queue TUN device; choose another name, \
                 or delete it (ip link delete {name})"
            ),
            Self::BadFd { reason } => write!(f, "the TUN descriptor handed over {reason}"),
            Self::Os { action, source } => write!(f, "{action}: {source}"),
        }
    }
}

impl std::error::Error for TunError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        if let Self::Os { source, .. } = self { Some(source) } else { None }
    }
}

/// One queue of a TUN device.
#[derive(Debug)]
pub struct Tun {
    file: File,
    name: String,
    caps: TunCaps,
    /// Whoever opened the device, and not a further way into it.
    first: bool,
}

impl Drop for Tun {
    fn drop(&mut self) {
        // What was granted belongs to the device, which may outlive us when it is persistent.
        if self.caps.tso && self.first {
            let _ = fd::tun_set_offload(self.file.as_fd(), 0);
        }
    }
}

impl Tun {
    /// Creates the interface `name`, or takes over one of this name that was made persistent and that nobody
    /// holds.
    ///
    /// # Errors
    /// See [`TunError`]; nothing is left behind.
    pub fn open(name: &str) -> Result<Self, TunError> {
        Self::open_as(name, TUN)
    }

    /// As [`Tun::open`], an interface that may have several queues: see [`Tun::further_queues`].
    ///
    /// # Errors
    /// See [`TunError`]; nothing is left behind.
    pub fn open_multi(name: &str) -> Result<Self, TunError> {
        Self::open_as(name, TUN | MULTI)
    }

    fn open_as(name: &str, flags: u16) -> Result<Self, TunError> {
        check_name(name)?;
        Self::set_up(name, flags | VNET).or_else(|error| match error {
            // A kernel that refuses the virtio header, in whichever step, gets plain packets.
            TunError::NotTun { .. } | TunError::Os { .. } => Self::set_up(name, flags),
            other @ (TunError::BadName { .. }
            | TunError::NoNode
            | TunError::NodeDenied
            | TunError::NoDriver
            | TunError::NotPermitted { .. }
            | TunError::Taken { .. }
            | TunError::BadFd { .. }) => Err(other),
        })
    }

    /// Takes over a descriptor on which an interface is open already, with `IFF_NO_PI`. The kernel does not
    /// tell whether that is so: it reports "no filter" by the same bit.
    ///
    /// # Errors
    /// [`TunError::BadFd`] when it is no TUN device.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, TunError> {
        let mut req = IfReq::new("");
        req.call(fd.as_fd(), IfCall::TunQuery)
            .map_err(|_| TunError::BadFd { reason: "is not a TUN device with an interface" })?;
        if req.flags() & libc::IFF_TUN as u16 == 0 {
            return Err(TunError::BadFd { reason: "is a TAP device; a TUN device is needed" });
        }
        Self::adopt(File::from(fd), &req)
    }

    fn set_up(name: &str, flags: u16) -> Result<Self, TunError> {
        let file = open_node()?;
        let mut req = IfReq::new(name);
        req.set_flags(flags | EXCLUSIVE);
        let mut result = req.call(file.as_fd(), IfCall::TunAttach);
        if result.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::EBUSY)) {
            // The name exists. Joining it succeeds if it is a TUN device nobody holds.
            req = IfReq::new(name);
            req.set_flags(flags);
            result = req.call(file.as_fd(), IfCall::TunAttach);
        }
        result.map_err(|source| match source.raw_os_error() {
            Some(libc::EPERM) => TunError::NotPermitted { name: name.to_owned() },
            Some(libc::EBUSY) => TunError::Taken { name: name.to_owned() },
            Some(libc::EINVAL) => TunError::NotTun { name: name.to_owned() },
            _ => TunError::Os { action: "cannot create the interface", source },
        })?;
        req.set_flags(flags);
        Self::adopt(file, &req)
    }

    fn adopt(file: File, req: &IfReq) -> Result<Self, TunError> {
        let os = |action| move |source| TunError::Os { action, source };
        SockRef::from(&file).set_nonblocking(true).map_err(os("cannot set the TUN device non-blocking"))?;
        let vnet = req.flags() & VNET != 0;
        if vnet {
            // Both belong to the device and may be left over from its last user: first nothing, then ours.
            fd::tun_set_offload(file.as_fd(), 0)
                .map_err(os("cannot reset the offloads of the TUN device"))?;
            fd::tun_set_header_size(file.as_fd(), VnetHdr::LEN as i32)
                .map_err(os("cannot set the header size of the TUN device"))?;
        }
        Ok(Self { file, name: req.name(), caps: TunCaps { vnet, ..TunCaps::default() }, first: true })
    }

    /// Asks for super-packets and leaves checksums to us, as far as the kernel grants it; nothing when that is
    /// switched off or packets carry no virtio header.
    pub fn enable(&mut self, offloads: Offloads) {
        if !self.caps.vnet || !offloads.tun {
            return;
        }
        let granted = |mask| fd::tun_set_offload(self.file.as_fd(), mask).is_ok();
        self.caps.tso = granted(CSUM | TSO);
        self.caps.uso = self.caps.tso && granted(CSUM | TSO | USO);
    }

    /// Another way into the same queue, so that one thread reads it and another writes to it.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn share(&self) -> io::Result<Self> {
        Ok(Self { file: self.file.try_clone()?, name: self.name.clone(), caps: self.caps, first: false })
    }

    /// `count` queues more of an interface from [`Tun::open_multi`], each to be read by a thread of its own. From then on
    /// this one is for writing only: the kernel sends a flow to the queue that it was last written to, and would move
    /// flows between readers; one that is not in use for reading does not count there.
    ///
    /// # Errors
    /// The kernel grants no such queue.
    pub fn further_queues(&self, count: usize) -> Result<Vec<Self>, TunError> {
        let os = |action| move |source| TunError::Os { action, source };
        let vnet = if self.caps.vnet { VNET } else { 0 };
        let another = |_| {
            let file = open_node()?;
            let mut req = IfReq::new(&self.name);
            req.set_flags(TUN | MULTI | vnet);
            req.call(file.as_fd(), IfCall::TunAttach).map_err(os("cannot add a queue to the interface"))?;
            SockRef::from(&file).set_nonblocking(true).map_err(os("cannot set the queue non-blocking"))?;
            Ok(Self { file, name: self.name.clone(), caps: self.caps, first: false })
        };
        let queues = (0..count).map(another).collect::<Result<_, _>>()?;
        let mut req = IfReq::new(&self.name);
        req.set_flags(DETACH);
        req.call(self.file.as_fd(), IfCall::TunQueue).map_err(os("cannot set a queue aside for writing"))?;
        Ok(queues)
    }

    /// Sets the MTU of the interface, in bytes.
    ///
    /// # Errors
    /// Not permitted, or the interface cannot have this MTU.
    pub fn set_mtu(&self, mtu: u16) -> Result<(), TunError> {
        let os = |source| TunError::Os { action: "cannot set the MTU of the TUN device", source };
        let mut config = tun::Configuration::default();
        config.raw_fd(self.file.try_clone().map_err(os)?.into_raw_fd()).tun_name(&self.name);
        let mut device = tun::create(&config).map_err(|e| os(e.into()))?;
        device.set_mtu(mtu).map_err(|e| os(e.into()))
    }

    /// The interface's name when it was opened, as the kernel says.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl AsFd for Tun {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl TunQueue for Tun {
    fn recv(&mut self, buf: &mut [u8]) -> io::Result<(usize, VnetHdr)> {
        let mut raw = [0; VnetHdr::LEN];
        if !self.caps.vnet {
            return self.read(|file| raw::read(file, &mut *buf)).map(|n| (n, VnetHdr::default()));
        }
        let n = self.read(|file| raw::readv(file, &mut [IoSliceMut::new(&mut raw), IoSliceMut::new(buf)]))?;
        Ok((n.saturating_sub(VnetHdr::LEN), described(&raw)))
    }

    fn recv_in(&mut self, room: &mut [u8]) -> io::Result<(usize, VnetHdr)> {
        if !self.caps.vnet {
            return self.recv(room.get_mut(VnetHdr::LEN..).unwrap_or_default());
        }
        let n = self.read(|file| raw::read(file, &mut *room))?;
        let raw = room.first_chunk().ok_or(io::ErrorKind::InvalidInput)?;
        Ok((n.saturating_sub(VnetHdr::LEN), described(raw)))
    }

    fn send(&mut self, hdr: &VnetHdr, parts: &[IoSlice<'_>]) -> io::Result<()> {
        let raw = hdr.to_bytes();
        let mut all = [IoSlice::new(&[]); MAX_PARTS];
        let mut places = all.iter_mut();
        if self.caps.vnet
            && let Some(place) = places.next()
        {
            *place = IoSlice::new(&raw);
        }
        for part in parts {
            *places.next().ok_or(io::ErrorKind::InvalidInput)? = IoSlice::new(part);
        }
        let used = MAX_PARTS.saturating_sub(places.len());
        self.write(|file| raw::writev(file, all.get(..used).unwrap_or_default()))
    }

    fn send_plain(&mut self, room: &mut [u8]) -> io::Result<()> {
        let (hdr, packet) = room.split_at_mut_checked(VnetHdr::LEN).ok_or(io::ErrorKind::InvalidInput)?;
        if self.caps.vnet {
            hdr.fill(0);
            self.write(|file| raw::write(file, room))
        } else {
            self.write(|file| raw::write(file, packet))
        }
    }

    fn caps(&self) -> TunCaps {
        self.caps
    }

    fn attach(&mut self, poller: &Poller) -> io::Result<()> {
        poller.watch(self.file.as_fd(), Queue::Tun)
    }

    fn detach(&mut self, poller: &Poller) -> io::Result<()> {
        poller.unwatch(self.file.as_fd())
    }
}

/// What the kernel says of a packet that it hands over.
fn described(raw: &[u8; VnetHdr::LEN]) -> VnetHdr {
    let mut hdr = VnetHdr::from_bytes(raw);
    // "Already verified" is information only, and says nothing once a packet is sealed.
    hdr.flags &= VnetHdr::NEEDS_CSUM;
    hdr
}

impl Tun {
    fn read(&self, mut attempt: impl FnMut(&File) -> Result<usize, Errno>) -> io::Result<usize> {
        loop {
            match attempt(&self.file) {
                Err(Errno::INTR) => {}
                other => return Ok(other?),
            }
        }
    }

    /// A packet is taken whole or not at all.
    fn write(&self, mut attempt: impl FnMut(&File) -> Result<usize, Errno>) -> io::Result<()> {
        loop {
            match attempt(&self.file) {
                Err(Errno::INTR) => {}
                other => return Ok(other.map(drop)?),
            }
        }
    }
}

fn check_name(name: &str) -> Result<(), TunError> {
    let bad = |c: char| c == '/' || c == ':' || c == '%' || c.is_whitespace() || c.is_control();
    if name.is_empty() || name.len() > MAX_NAME || name == "." || name == ".." || name.contains(bad) {
        return Err(TunError::BadName { name: name.to_owned() });
    }
    Ok(())
}

/// Opens the node, making it first where it is missing and that is allowed.
fn open_node() -> Result<File, TunError> {
    let open = || OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(NODE);
    let result = open().or_else(|error| {
        if error.kind() != io::ErrorKind::NotFound {
            return Err(error);
        }
        // Slim containers come without it. 10:200 is its number since Linux 2.4. A node that may be made but
        // not opened (the device list of the container forbids it) is taken away again.
        let _ = std::fs::create_dir("/dev/net");
        let made = fd::make_node(NODE_C, 10, 200).is_ok();
        open().inspect_err(|_| {
            if made {
                let _ = std::fs::remove_file(NODE);
            }
        })
    });
    result.map_err(|source| match source.raw_os_error() {
        Some(libc::ENOENT) => TunError::NoNode,
        Some(libc::EPERM | libc::EACCES) => TunError::NodeDenied,
        Some(libc::ENODEV | libc::ENXIO) => TunError::NoDriver,
        _ => TunError::Os { action: "cannot open /dev/net/tun", source },
    })
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::time::Duration;

    use super::*;
    use crate::io::device_gone;
    use crate::io::namespace::{in_namespace, run};
    use crate::time::Instant;

    #[test]
    fn names_no_interface_can_have_are_refused_with_what_is_allowed() {
        for name in ["", "sixteen-bytes-xx", "a/b", "a b", "a:b", "wg%d", ".", "..", "a\u{7}"] {
            let error = Tun::open(name).unwrap_err();
            assert!(matches!(error, TunError::BadName { .. }), "{name:?}: {error}");
            assert!(error.to_string().contains("1 to 15 bytes"), "{error}");
        }
        assert!(check_name("fifteen-bytes-x").is_ok());
        assert!(check_name("wg0").is_ok());
    }

    #[test]
    fn descriptor_that_is_no_tun_device_is_refused() {
        let file = File::open("/dev/null").unwrap();
        let error = Tun::from_fd(file.into()).unwrap_err();
        assert!(matches!(error, TunError::BadFd { .. }), "{error}");
    }

    #[test]
    fn every_error_says_what_to_do() {
        let name = || "wg0".to_owned();
        for error in [TunError::NoNode, TunError::NodeDenied, TunError::NotPermitted { name: name() }] {
            assert!(error.to_string().contains("container"), "{error}");
        }
        assert!(TunError::NoDriver.to_string().contains("modprobe"));
        assert!(TunError::Taken { name: name() }.to_string().contains("choose another name"));
        assert!(TunError::NotTun { name: name() }.to_string().contains("ip link delete wg0"));
    }

    fn vnet_and_plain() -> [(u16, &'static str); 2] {
        [(TUN | VNET, "fvt0"), (TUN, "fvt1")]
    }

    #[test]
    fn created_interface_has_the_name_is_held_alone_and_goes_with_the_queue() {
        in_namespace(|| {
            let tun = Tun::open("fvt0").unwrap();
            assert_eq!((tun.name(), tun.caps().vnet), ("fvt0", true));
            run("ip link show dev fvt0");
            let error = Tun::open("fvt0").unwrap_err();
            assert!(matches!(error, TunError::Taken { .. }), "{error}");
            drop(tun);
            Tun::open("fvt0").unwrap();
        });
    }

    #[test]
    fn persistent_device_is_joined_only_when_nobody_holds_it_and_it_is_a_plain_tun() {
        in_namespace(|| {
            run("ip tuntap add dev fvt0 mode tun");
            let tun = Tun::open("fvt0").unwrap();
            assert!(matches!(Tun::open("fvt0"), Err(TunError::Taken { .. })));
            drop(tun);
            run("ip link show dev fvt0");
            run("ip tuntap add dev fvt1 mode tap");
            run("ip tuntap add dev fvt2 mode tun multi_queue");
            run("ip link add fvt3 type veth peer name fvt4");
            for name in ["fvt1", "fvt2", "fvt3"] {
                let error = Tun::open(name).unwrap_err();
                assert!(matches!(error, TunError::NotTun { .. }), "{name}: {error}");
            }
        });
    }

    #[test]
    fn inherited_descriptor_works_as_the_one_it_copies_and_a_tap_device_is_refused() {
        in_namespace(|| {
            for (flags, name) in vnet_and_plain() {
                let first = Tun::set_up(name, flags).unwrap();
                let copy = Tun::from_fd(first.as_fd().try_clone_to_owned().unwrap()).unwrap();
                assert_eq!((copy.name(), copy.caps()), (name, first.caps()));
            }
            let file = open_node().unwrap();
            let mut req = IfReq::new("fvt2");
            req.set_flags((libc::IFF_TAP | libc::IFF_NO_PI) as u16);
            req.call(file.as_fd(), IfCall::TunAttach).unwrap();
            let error = Tun::from_fd(file.into()).unwrap_err();
            assert!(matches!(error, TunError::BadFd { .. }), "{error}");
        });
    }

    /// Turns a packet round: what was sent to the other end comes back from there.
    fn turn_round(packet: &mut [u8]) {
        assert!(packet.len() >= 24);
        let (from, to) = packet[12..20].split_at_mut(4);
        from.swap_with_slice(to);
        let (from, to) = packet[20..24].split_at_mut(2);
        from.swap_with_slice(to);
    }

    #[test]
    //@test C-OUT-5
    fn packets_of_every_length_cross_in_both_directions_with_and_without_the_virtio_header() {
        in_namespace(|| {
            for (flags, name) in vnet_and_plain() {
                let mut tun = Tun::set_up(name, flags).unwrap();
                run(&format!("ip link set {name} up mtu 65475"));
                run(&format!("ip addr add 10.9.0.1/24 dev {name}"));
                let socket = UdpSocket::bind("10.9.0.1:7").unwrap();
                socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
                let mut buf = vec![0; 65_536 + VnetHdr::LEN];
                for len in [0, 1, 1392, 34_708, 65_447] {
                    let sent: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
                    socket.send_to(&sent, "10.9.0.2:7").unwrap();
                    let packet = loop {
                        // Both ways to read, by turns.
                        let (got, hdr) = match len % 2 {
                            0 => tun.recv_in(&mut buf),
                            _ => tun.recv(&mut buf[VnetHdr::LEN..]),
                        }
                        .unwrap();
                        // The kernel greets a new interface with IPv6 router solicitations.
                        if buf[VnetHdr::LEN] == 0x45 {
                            assert_eq!((got, hdr), (28 + len, VnetHdr::default()));
                            break got;
                        }
                    };
                    turn_round(&mut buf[VnetHdr::LEN..VnetHdr::LEN + packet]);
                    let mut answer = vec![0; 65_536];
                    tun.send_plain(&mut buf[..VnetHdr::LEN + packet]).unwrap();
                    assert_eq!(socket.recv(&mut answer).unwrap(), len);
                    assert_eq!(answer[..len], sent);
                    // The same again, gathered from pieces.
                    let (head, tail) = buf[VnetHdr::LEN..VnetHdr::LEN + packet].split_at(20);
                    tun.send(&VnetHdr::default(), &[IoSlice::new(head), IoSlice::new(tail)]).unwrap();
                    assert_eq!(socket.recv(&mut answer).unwrap(), len);
                    assert_eq!(answer[..len], sent);
                }
                run(&format!("ip link set {name} down"));
            }
        });
    }

    #[test]
    fn down_is_survived_and_deletion_is_recognised() {
        in_namespace(|| {
            for (flags, name) in vnet_and_plain() {
                let mut tun = Tun::set_up(name, flags).unwrap();
                let mut room = [0; VnetHdr::LEN + 20];
                room[VnetHdr::LEN] = 0x45;
                let error = tun.send_plain(&mut room).unwrap_err();
                assert_eq!(error.raw_os_error(), Some(libc::EIO));
                assert_eq!(tun.recv(&mut [0; 100]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
                run(&format!("ip link set {name} up"));
                tun.send_plain(&mut room).unwrap();
                assert_eq!(tun.send_plain(&mut [0; 3]).unwrap_err().kind(), io::ErrorKind::InvalidInput);

                let mut poller = Poller::new().unwrap();
                tun.attach(&poller).unwrap();
                while tun.recv(&mut [0; 2000]).is_ok() {}
                run(&format!("ip link delete {name}"));
                // Woken by it, not by a timer.
                poller.park(Instant::ZERO, None).unwrap();
                while let Ok(_packet) = tun.recv(&mut [0; 2000]) {}
                assert!(device_gone(&tun.recv(&mut [0; 100]).unwrap_err()));
                assert!(device_gone(&tun.send_plain(&mut room).unwrap_err()));
            }
        });
    }
}
