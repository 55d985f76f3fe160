//! The seam between the pure core and the sockets: what one read gave, what one send takes.

use core::fmt;
use core::net::{IpAddr, SocketAddr, SocketAddrV4};
use std::sync::Arc;

use crate::device::PeerId;
use crate::offload::VnetHdr;
use crate::session::SealKey;

/// A local address a datagram arrived at, so that the answer can leave from there (sticky source, C-OUT-7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LocalAddr {
    /// The destination address of the datagram that arrived.
    pub ip: IpAddr,
    /// The interface it arrived at; 0 when unknown.
    pub ifindex: u32,
}

/// Who to talk to, and from which local address the last authenticated packet came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// The peer's UDP address; never an IPv4-mapped IPv6 one.
    pub remote: SocketAddr,
    /// The local address to send from, when it is known.
    pub local: Option<LocalAddr>,
}

impl Endpoint {
    /// An endpoint that lets the kernel choose the source address. An IPv4-mapped address becomes IPv4.
    pub fn new(remote: SocketAddr) -> Self {
        Self { remote: canonical(remote), local: None }
    }
}

/// `::ffff:a.b.c.d` as `a.b.c.d`; everything else unchanged.
pub fn canonical(addr: SocketAddr) -> SocketAddr {
    if let SocketAddr::V6(v6) = addr
        && let Some(v4) = v6.ip().to_ipv4_mapped()
    {
        return SocketAddrV4::new(v4, v6.port()).into();
    }
    addr
}

/// The two ECN bits of an outer IP header (RFC 3168).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Ecn {
    /// Not ECN-capable.
    #[default]
    NotEct = 0,
    /// ECT(1).
    Ect1 = 1,
    /// ECT(0).
    Ect0 = 2,
    /// Congestion experienced.
    Ce = 3,
}

impl Ecn {
    /// The low two bits of a TOS or traffic class byte.
    pub const fn from_bits(tos: u8) -> Self {
        match tos & 3 {
            0 => Self::NotEct,
            1 => Self::Ect1,
            2 => Self::Ect0,
            _ => Self::Ce,
        }
    }
}

/// What goes out round each datagram of one train.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// Where to, and from which local address.
    pub to: Endpoint,
    /// Whose traffic it is; `None` for cookie replies. A datagram that could not be sent is taken back from the
    /// count of this peer ([`Device::unsent`](crate::Device::unsent)).
    pub peer: Option<PeerId>,
    /// IPv4 TOS or IPv6 traffic class: DSCP and ECN bits.
    pub tos: u8,
    /// TTL or hop limit; `None`: the system's default.
    pub hops: Option<u8>,
}

impl Envelope {
    /// For an endpoint, with nothing else said.
    pub const fn new(to: Endpoint) -> Self {
        Self { to, peer: None, tos: 0, hops: None }
    }

    /// The ECN bits of the outer header.
    pub const fn ecn(&self) -> Ecn {
        Ecn::from_bits(self.tos)
    }
}

/// Where the core puts datagrams. Implemented by the worker's send arena, and by a `Vec` in tests.
pub trait Outbox {
    /// Room for `count` datagrams of `stride` bytes each (the last may end up shorter), contiguous.
    /// `None`: no room; the caller counts a [`Discard::NoRoom`](crate::Discard::NoRoom) and goes on.
    fn reserve(&mut self, envelope: &Envelope, stride: usize, count: usize) -> Option<&mut [u8]>;

    /// Keeps the first `len` bytes of the latest reservation; without it the reservation is void.
    fn commit(&mut self, len: usize);

    /// Does it seal data packets itself, when many are there? Then they come by [`Outbox::commit_clear`].
    fn defers(&self) -> bool {
        false
    }

    /// As [`Outbox::commit`], but each datagram is plaintext, laid out with room for its header and tag; it must be
    /// sealed before anybody sees it. Called only where [`Outbox::defers`].
    fn commit_clear(&mut self, len: usize, sealing: Sealing<'_>) {
        let _ = (len, sealing);
    }
}

/// What datagrams that were laid out are to be sealed with.
#[derive(Clone, Copy)]
pub struct Sealing<'k> {
    pub(crate) key: &'k Arc<SealKey>,
    /// Counter of the first one; the others follow.
    pub(crate) first: u64,
}

impl Sealing<'_> {
    /// Seals datagrams of `stride` bytes back to back in place, the last may be shorter.
    pub fn seal(&self, train: &mut [u8], stride: usize) {
        self.key.seal_train(self.first, train, stride);
    }
}

impl fmt::Debug for Sealing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sealing").field("first", &self.first).finish_non_exhaustive()
    }
}

/// What one TUN read gave: an IP packet, or a super-packet and how the kernel wants it cut.
#[derive(Debug)]
pub struct Frame<'b> {
    /// All zeros for a plain packet.
    pub hdr: VnetHdr,
    /// The IP packet, without the virtio header.
    pub bytes: &'b mut [u8],
}

/// What one UDP read gave: datagrams of `stride` bytes back to back, the last may be shorter.
#[derive(Debug)]
pub struct Received<'b> {
    /// All datagrams.
    pub bytes: &'b mut [u8],
    /// Length of each datagram but the last; never 0 unless `bytes` is empty.
    pub stride: usize,
    /// Who sent them, and which of our addresses they reached.
    pub from: Endpoint,
    /// ECN bits of the outer header.
    pub ecn: Ecn,
}

/// One send: datagrams of `stride` bytes back to back for one endpoint, the last may be shorter.
#[derive(Clone, Copy, Debug)]
pub struct Train<'b> {
    /// What goes round each.
    pub envelope: Envelope,
    /// Length of each datagram but the last.
    pub stride: usize,
    /// All datagrams.
    pub bytes: &'b [u8],
}

impl Train<'_> {
    /// How many datagrams the train holds.
    pub const fn count(&self) -> usize {
        if self.stride == 0 { 0 } else { self.bytes.len().div_ceil(self.stride) }
    }
}

/// Whose datagrams were not sent after all, until the device is told ([`Device::unsent`](crate::Device::unsent)).
/// Bounded: what more peers than it holds lost at once stays counted as sent.
#[derive(Debug)]
pub struct Unsent(Vec<(PeerId, u64)>);

impl Unsent {
    const MOST: usize = 1024;

    /// An empty one; its memory is taken now.
    pub fn new() -> Self {
        Self(Vec::with_capacity(Self::MOST))
    }

    /// `bytes` of this train were not sent.
    pub fn note(&mut self, train: &Train<'_>, bytes: usize) {
        let Some(peer) = train.envelope.peer else { return };
        if let Some((last, sum)) = self.0.last_mut()
            && *last == peer
        {
            *sum = sum.saturating_add(bytes as u64);
        } else if self.0.len() < Self::MOST {
            self.0.push((peer, bytes as u64));
        }
    }

    /// A peer and how many bytes of its were not sent. Each is given once.
    pub fn poll(&mut self) -> Option<(PeerId, u64)> {
        self.0.pop()
    }
}

impl Default for Unsent {
    fn default() -> Self {
        Self::new()
    }
}

/// A plaintext IP packet lying in the receive buffer that was handed to
/// [`Device::inbound`](crate::Device::inbound).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Offset of the first byte in `Received::bytes`; at least 16 bytes before it are free to overwrite.
    pub at: u32,
    /// Length in bytes, already cut to the inner IP length.
    pub len: u16,
}
