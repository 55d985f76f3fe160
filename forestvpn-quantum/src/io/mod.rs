//! The edge: a TUN queue and a UDP socket pair behind two narrow, batched, non-blocking traits, each with a
//! real implementation (Linux) and an in-memory one for tests and for `fv demo` without a TUN device.

use std::io;
use std::io::IoSlice;

use crate::batch::{Endpoint, Train, Unsent};
use crate::event::GivenUp;
use crate::offload::VnetHdr;

mod bind;
pub mod clock;
mod cmsg;
pub mod fd;
pub mod link;
pub mod mem;
#[cfg(test)]
pub(crate) mod namespace;
mod offloads;
pub mod poll;
pub mod slots;
pub mod tun;
pub mod udp;

pub use bind::SocketBuffers;
pub use clock::BootClock;
pub use link::{Link, LinkStatus};
pub use offloads::{Kernel, Offloads, UnknownOffload};
pub use poll::{Poller, Queue, Ready};
pub use slots::{RxMeta, RxSlots};
pub use tun::{Tun, TunError};
pub use udp::{Sockets, Udp};

/// What a TUN queue can do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TunCaps {
    /// Every read and write carries a virtio header.
    pub vnet: bool,
    /// Reads may give, and writes may be, TCP super-packets.
    pub tso: bool,
    /// Reads may give, and writes may be, UDP super-packets.
    pub uso: bool,
}

/// One queue of a TUN device. Nothing blocks: `WouldBlock` says that there is nothing to do.
pub trait TunQueue {
    /// Reads one packet or super-packet into `buf`; gives its length.
    ///
    /// # Errors
    /// `WouldBlock` when no packet waits; see [`device_gone`] for the rest.
    fn recv(&mut self, buf: &mut [u8]) -> io::Result<(usize, VnetHdr)>;

    /// As [`TunQueue::recv`], but the packet starts [`VnetHdr::LEN`] bytes into `room`: so header and packet come
    /// by one plain read.
    ///
    /// # Errors
    /// As [`TunQueue::recv`].
    fn recv_in(&mut self, room: &mut [u8]) -> io::Result<(usize, VnetHdr)> {
        self.recv(room.get_mut(VnetHdr::LEN..).unwrap_or_default())
    }

    /// Writes one packet or super-packet, gathered from `parts`.
    ///
    /// # Errors
    /// Whatever the kernel says; the packet was then not taken. `EIO`: the interface is down.
    fn send(&mut self, hdr: &VnetHdr, parts: &[IoSlice<'_>]) -> io::Result<()>;

    /// Writes the plain packet that starts [`VnetHdr::LEN`] bytes into `room`. The bytes before it are
    /// scratch: the dead message header, where the virtio header can be laid without a copy.
    ///
    /// # Errors
    /// As [`TunQueue::send`].
    fn send_plain(&mut self, room: &mut [u8]) -> io::Result<()> {
        self.send(&VnetHdr::default(), &[IoSlice::new(room.get(VnetHdr::LEN..).unwrap_or_default())])
    }

    /// What was granted.
    fn caps(&self) -> TunCaps;

    /// Has `poller` woken when a packet waits, or when the device goes away.
    ///
    /// # Errors
    /// When the kernel refuses to watch it.
    fn attach(&mut self, poller: &Poller) -> io::Result<()>;

    /// Takes that back: somebody else reads the queue.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn detach(&mut self, _poller: &Poller) -> io::Result<()> {
        Ok(())
    }
}

/// Whether an error of a TUN queue means that the interface was deleted, for good. `EIO` does not: the
/// interface is only down.
pub fn device_gone(error: &io::Error) -> bool {
    // EBADFD: the descriptor has no interface any more. The other two come from drivers that were unloaded
    // and from descriptors that somebody closed under us.
    matches!(error.raw_os_error(), Some(libc::EBADFD | libc::ENODEV | libc::EBADF))
}

/// What a UDP socket pair can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpCaps {
    /// Most datagrams in one send; 1 = no segmentation offload.
    pub gso_segments: usize,
    /// Reads may give trains.
    pub gro: bool,
}

/// How open sockets are equipped at this moment, for whoever looks after them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpStatus {
    /// There is an IPv4 socket.
    pub ipv4: bool,
    /// There is an IPv6 socket.
    pub ipv6: bool,
    /// What the kernel granted.
    pub buffers: SocketBuffers,
    /// Most datagrams in one send when the sockets were opened; 1 = no segmentation offload.
    pub granted_segments: usize,
    /// The same now; 1 after it was given up.
    pub segments: usize,
    /// Destinations to which segmentation offload was given up.
    pub paths_without: usize,
    /// Reads may give trains.
    pub gro: bool,
}

/// What happened on a UDP socket pair, counted in datagrams unless said otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UdpCounters {
    /// Received.
    pub received: u64,
    /// Received, but longer than the slot: dropped (C-FMT-4).
    pub truncated: u64,
    /// Errors while receiving, such as a peer's ICMP answers.
    pub receive_errors: u64,
    /// Sent.
    pub sent: u64,
    /// Not sent: the socket buffer stayed full.
    pub lost_full: u64,
    /// Not sent: no route, refused by a firewall, too long and the like.
    pub lost_refused: u64,
    /// Not sent: no socket of this address family is open.
    pub lost_no_socket: u64,
    /// Sources that could not be kept: sent from another local address instead (C-OUT-7).
    pub source_lost: u64,
    /// Trains that the kernel refused to cut: sent again one datagram at a time.
    pub gso_fallbacks: u64,
    /// System calls that read.
    pub reads: u64,
    /// System calls that sent.
    pub writes: u64,
}

impl UdpCounters {
    /// What other sockets counted comes on top.
    pub(crate) const fn add(&mut self, other: &Self) {
        self.received += other.received;
        self.truncated += other.truncated;
        self.receive_errors += other.receive_errors;
        self.sent += other.sent;
        self.lost_full += other.lost_full;
        self.lost_refused += other.lost_refused;
        self.lost_no_socket += other.lost_no_socket;
        self.source_lost += other.source_lost;
        self.gso_fallbacks += other.gso_fallbacks;
        self.reads += other.reads;
        self.writes += other.writes;
    }
}

/// A pair of UDP sockets (IPv4 and IPv6) on one port. Nothing blocks. Starts closed.
pub trait UdpQueue {
    /// Fills `slots` with what waits; gives the number of slots filled. Fewer than there are slots: for now
    /// nothing more waits.
    ///
    /// # Errors
    /// `WouldBlock` when nothing waits, or all is closed. Errors that a peer's host caused by ICMP are
    /// swallowed and counted.
    fn recv(&mut self, slots: &mut RxSlots) -> io::Result<usize>;

    /// Which of the sockets may have something, by [`Poller::park`]: the others need not be tried until told
    /// again.
    fn stirred(&mut self, _ready: Ready) {}

    /// Sends trains in order; gives how many were taken, the rest stays with the caller. A train that can
    /// never be sent (no route, refused) counts as taken, is counted as lost and noted in `unsent`.
    ///
    /// # Errors
    /// `WouldBlock` when there is no room and nothing was taken.
    fn send(&mut self, trains: &[Train<'_>], unsent: &mut Unsent) -> io::Result<usize>;

    /// What was granted.
    fn caps(&self) -> UdpCaps;

    /// Opens sockets on `port` (0: one that is free) with the mark `fwmark` (0: none) and only then closes
    /// those that were open. Does nothing when they have this port already, except to set the mark.
    /// Gives the port.
    ///
    /// # Errors
    /// The port is in use or forbidden, or the mark may not be set: then all stays as it was.
    fn open(&mut self, port: u16, fwmark: u32) -> io::Result<u16>;

    /// Closes the sockets.
    fn close(&mut self);

    /// The port, while open.
    fn port(&self) -> Option<u16>;

    /// Has `poller` woken when a datagram waits. To be called again after each [`UdpQueue::open`].
    ///
    /// # Errors
    /// When the kernel refuses to watch it.
    fn attach(&mut self, poller: &Poller) -> io::Result<()>;

    /// An endpoint whose local address turned out not to work any more; each is given once (C-OUT-7).
    fn poll_lost_source(&mut self) -> Option<Endpoint>;

    /// What was counted so far.
    fn counters(&self) -> UdpCounters;

    /// How the sockets are equipped, while open and where there is something to say.
    fn status(&self) -> Option<UdpStatus> {
        None
    }

    /// The open sockets, for other threads to send by, where that is possible.
    fn sockets(&self) -> Option<Sockets> {
        None
    }

    /// A trick that the kernel refused; each is given once.
    fn poll_given_up(&mut self) -> Option<GivenUp> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interface_that_is_down_is_not_gone() {
        assert!(!device_gone(&io::Error::from_raw_os_error(libc::EIO)));
        assert!(!device_gone(&io::Error::from(io::ErrorKind::WouldBlock)));
        assert!(device_gone(&io::Error::from_raw_os_error(libc::EBADFD)));
    }
}
