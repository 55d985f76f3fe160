//! What becomes of a packet for a known peer: judged, cut, laid out and sealed. Done by the device, and by the threads
//! that carry packets for it.

use core::net::IpAddr;
use std::sync::Arc;

use crate::batch::{Endpoint, Envelope, Frame, Outbox, Sealing};
use crate::device::PeerId;
use crate::event::Discard;
use crate::ip;
use crate::mss::{self, Mss};
use crate::offload::VnetHdr;
use crate::offload::split::Splitter;
use crate::session::{self, SealKey, datagram_len};
use crate::wire;

/// Most datagrams of one train: what the kernel takes in one send (`UDP_MAX_SEGMENTS`).
const MAX_TRAIN: usize = 64;
/// Most bytes of one train: the payload limit of one IPv4 datagram.
const MAX_TRAIN_BYTES: usize = 65_507;
/// Hops that a message of this protocol loses by going through a tunnel itself.
const NESTED_HOPS: u8 = 8;

/// The peer that a packet goes to, and the interface that it came by.
#[derive(Clone, Copy)]
pub(crate) struct Peer<'k> {
    pub(crate) id: PeerId,
    pub(crate) endpoint: Endpoint,
    /// The key of the current session, fit for sending or not.
    pub(crate) session: Option<&'k SealKey>,
    pub(crate) mtu: u16,
    pub(crate) mss: Mss,
}

/// May `frame`, which is for `to`, go to this peer? Gives what goes round each of its datagrams.
#[inline(always)]
pub(crate) fn admit(frame: &mut Frame<'_>, to: IpAddr, peer: &Peer<'_>) -> Result<Envelope, Discard> {
    let payload = ip::udp_payload(frame.bytes);
    // It came back by a routing loop, and would go round for ever, growing each time.
    let own = |payload| peer.session.is_some_and(|session| session.made(payload));
    if to == peer.endpoint.remote.ip() && payload.is_some_and(own) {
        return Err(Discard::Looped);
    }
    let envelope = envelope(peer.endpoint, peer.id, frame.bytes, payload)?;
    let partial = frame.hdr.flags & VnetHdr::NEEDS_CSUM != 0;
    mss::clamp(frame.bytes, peer.mss, peer.mtu, partial);
    Ok(envelope)
}

/// Puts the packets of `cut` into `out`, with counters from `first` on. Gives how many found room, and their bytes.
///
/// One super-packet has one destination: one peer, one key, one reservation of counters. Its segments are equal but for
/// the last, hence the datagrams too: that is what one send takes.
#[inline(always)]
pub(crate) fn seal(
    cut: &Splitter<'_>,
    envelope: &Envelope,
    key: &Arc<SealKey>,
    first: u64,
    mtu: usize,
    out: &mut impl Outbox,
) -> (usize, usize) {
    let stride = datagram_len(cut.len(0), mtu);
    let per_train = (MAX_TRAIN_BYTES / stride).clamp(1, MAX_TRAIN);
    let (defers, mut sent, mut bytes) = (out.defers(), 0, 0);
    while sent < cut.count() {
        let count = per_train.min(cut.count() - sent);
        let Some(train) = out.reserve(envelope, stride, count) else { break };
        let mut len = 0;
        for (datagram, i) in train.chunks_mut(stride).zip(sent..sent + count) {
            let Some(datagram) = datagram.get_mut(..datagram_len(cut.len(i), mtu)) else { break };
            session::lay(datagram, cut.len(i), |packet| cut.write(i, packet));
            len += datagram.len();
        }
        let sealing = Sealing { key, first: first + sent as u64 };
        if defers {
            out.commit_clear(len, sealing);
        } else {
            sealing.seal(train.get_mut(..len).unwrap_or_default(), stride);
            out.commit(len);
        }
        sent += count;
        bytes += len;
    }
    (sent, bytes)
}

/// What goes round the datagrams of a packet. Tunnels that are routed into each other would hand a message round
/// for ever, larger each time; so one that goes through a tunnel itself keeps what is left of its hops, less some.
pub(crate) fn envelope(
    to: Endpoint,
    id: PeerId,
    packet: &[u8],
    payload: Option<&[u8]>,
) -> Result<Envelope, Discard> {
    let nested = payload.is_some_and(wire::claims);
    let hops = match ip::hops(packet).filter(|_| nested) {
        Some(hops) => Some(hops.checked_sub(NESTED_HOPS).filter(|&left| left > 0).ok_or(Discard::Looped)?),
        None => None,
    };
    Ok(Envelope { to, peer: Some(id), tos: ip::encapsulated(ip::ecn(packet)) as u8, hops })
}
