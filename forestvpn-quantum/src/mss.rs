//! The maximum segment size that TCP ends tell each other, made to fit the tunnel where packets are passed on: what
//! `iptables … TCPMSS` does on a router, for systems that have no such filter.
//!
//! Only packets with SYN carry the option (RFC 9293, 3.7.1); all others are told apart by two bytes. Later fragments,
//! IPv6 packets with extension headers, and segments without the option pass as they are: without it an end sends 536
//! or 1220 bytes, which fit. A value is only ever made smaller.

use crate::ip;
use crate::offload::checksum::{u16_at, updated};
use crate::wire::put;

/// The largest segment that ends are allowed to agree on, in bytes of TCP payload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mss {
    /// What the ends say stays as it is.
    #[default]
    Off,
    /// What fits the MTU of the tunnel: 40 bytes less over IPv4, 60 less over IPv6.
    Auto,
    /// This many; 0 would stop all TCP, so less than 64 counts as 64.
    Most(u16),
}

/// The least that is ever asked of an end: enough for its headers to be worth it.
const LEAST: u16 = 64;
/// TCP header without options.
const HEADER: usize = 20;
/// Where the flags are in it, and the one of a connection's first packets.
const FLAGS: usize = 13;
const SYN: u8 = 2;
/// Where the checksum is in it.
const CHECKSUM: usize = 16;

/// Puts `mss` for a tunnel of `mtu` bytes into the option of a SYN, if it says more. `partial`: the checksum field
/// covers the pseudo header only (`VIRTIO_NET_HDR_F_NEEDS_CSUM`) and stays, for whoever completes it sums the rest.
#[inline]
pub(crate) fn clamp(packet: &mut [u8], mss: Mss, mtu: u16, partial: bool) {
    if mss != Mss::Off
        && let Some((at, ip_header)) = ip::tcp(packet)
        && packet.get(at + FLAGS).is_some_and(|flags| flags & SYN != 0)
    {
        let most = match mss {
            Mss::Most(most) => most,
            Mss::Auto | Mss::Off => mtu.saturating_sub(ip_header + HEADER as u16),
        };
        lower(packet.get_mut(at..).unwrap_or_default(), most.max(LEAST), partial);
    }
}

/// The cold part: walks the options of one segment.
#[cold]
fn lower(segment: &mut [u8], most: u16, partial: bool) {
    const END: u8 = 0;
    const NOTHING: u8 = 1;
    const MSS: u8 = 2;
    let end = segment.get(12).map_or(0, |offset| usize::from(offset >> 4) * 4).min(segment.len());
    let mut at = HEADER;
    // Each turn moves on by a byte or more.
    while at < end {
        let length = match segment.get(at..end) {
            Some([END, ..]) | None => return,
            Some([NOTHING, ..]) => 1,
            Some([MSS, 4, _, _, ..]) => {
                let old = u16_at(segment, at + 2);
                if most < old {
                    put(segment, at + 2, &most.to_be_bytes());
                    if !partial {
                        // A value at an odd place lies across two of the sum's words: both halves swapped.
                        let seen = |value: u16| if at.is_multiple_of(2) { value } else { value.swap_bytes() };
                        let sum = updated(u16_at(segment, CHECKSUM), seen(old), seen(most));
                        put(segment, CHECKSUM, &sum.to_be_bytes());
                    }
                }
                return;
            }
            // One that says it is shorter than its own head is no option.
            Some([_, length, ..]) if *length >= 2 => usize::from(*length),
            Some(_) => return,
        };
        at += length;
    }
}

#[cfg(test)]
#[path = "../tests/unit/mss.rs"]
mod tests;
