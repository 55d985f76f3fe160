//! The edge: a TUN queue and a UDP socket pair behind two narrow, batched, non-blocking traits, each with a
//! real implementation (Linux) and an in-memory one for tests.

use std::io;
use std::io::IoSlice;

use crate::batch::{Ecn, Endpoint, Received, Train};
use crate::offload::VnetHdr;

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
    /// `WouldBlock` when no packet waits; anything else when the device is down or gone.
    fn recv(&mut self, buf: &mut [u8]) -> io::Result<(usize, VnetHdr)>;

    /// Writes one packet or super-packet, gathered from `parts`.
    ///
    /// # Errors
    /// Whatever the kernel says; the packet was then not taken.
    fn send(&mut self, hdr: &VnetHdr, parts: &[IoSlice<'_>]) -> io::Result<()>;

    /// What was granted.
    fn caps(&self) -> TunCaps;
}

/// What a UDP socket pair can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpCaps {
    /// Most datagrams in one send; 1 = no segmentation offload.
    pub gso_segments: usize,
    /// Reads may give trains.
    pub gro: bool,
}

/// What one slot of [`RxSlots`] holds after a read.
#[derive(Clone, Copy, Debug)]
pub struct RxMeta {
    /// Bytes in the slot.
    pub len: usize,
    /// Length of each datagram but the last.
    pub stride: usize,
    /// Who sent it.
    pub from: Endpoint,
    /// ECN bits of the outer header.
    pub ecn: Ecn,
}

/// Fixed receive memory: `count` slots of `size` bytes, allocated once.
#[derive(Debug)]
pub struct RxSlots {
    /// The slots, back to back.
    pub bytes: Vec<u8>,
    /// Bytes per slot.
    pub size: usize,
    /// One entry per filled slot, in order of arrival.
    pub metas: Vec<RxMeta>,
}

impl RxSlots {
    /// Allocates `count` slots of `size` bytes.
    pub fn new(count: usize, size: usize) -> Self {
        Self { bytes: vec![0; count * size], size, metas: Vec::with_capacity(count) }
    }

    /// How many slots there are.
    pub fn count(&self) -> usize {
        self.bytes.len() / self.size
    }

    /// The filled slot `i` as the core wants it.
    pub fn received(&mut self, i: usize) -> Option<Received<'_>> {
        let meta = *self.metas.get(i)?;
        let bytes = self.bytes.chunks_exact_mut(self.size).nth(i)?.get_mut(..meta.len)?;
        Some(Received { bytes, stride: meta.stride, from: meta.from, ecn: meta.ecn })
    }
}

/// A pair of UDP sockets (IPv4 and IPv6) on one port. Nothing blocks.
pub trait UdpQueue {
    /// Fills `slots` with what waits and sets `slots.metas`; gives the number of slots filled.
    ///
    /// # Errors
    /// `WouldBlock` when nothing waits. ICMP errors that some peer's host sent are swallowed and counted.
    fn recv(&mut self, slots: &mut RxSlots) -> io::Result<usize>;

    /// Sends trains in order; gives how many were taken, the rest stays with the caller.
    ///
    /// # Errors
    /// `WouldBlock` when the socket buffer is full and nothing was taken. A train that can never be sent
    /// (no route, refused) counts as taken and is counted as lost.
    fn send(&mut self, trains: &[Train<'_>]) -> io::Result<usize>;

    /// What was granted.
    fn caps(&self) -> UdpCaps;
}
