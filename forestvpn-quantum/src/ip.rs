//! The IP header fields the path needs; nothing here trusts a length it did not check.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::batch::Ecn;
use crate::offload::checksum;
use crate::wire::array_at;

const V4_HEADER: usize = 20;
const V6_HEADER: usize = 40;

enum Version {
    V4,
    V6,
}

/// IP version, when the packet is long enough for the fixed header of that version.
fn version(packet: &[u8]) -> Option<Version> {
    //@ C-OUT-1
    match packet.first()? >> 4 {
        4 if packet.len() >= V4_HEADER => Some(Version::V4),
        6 if packet.len() >= V6_HEADER => Some(Version::V6),
        _ => None,
    }
}

/// Destination address; `None` when this is no IP packet.
pub(crate) fn destination(packet: &[u8]) -> Option<IpAddr> {
    Some(match version(packet)? {
        Version::V4 => Ipv4Addr::from(array_at::<4>(packet, 16)).into(),
        Version::V6 => Ipv6Addr::from(array_at::<16>(packet, 24)).into(),
    })
}

/// Source address; `None` when this is no IP packet.
pub(crate) fn source(packet: &[u8]) -> Option<IpAddr> {
    Some(match version(packet)? {
        Version::V4 => Ipv4Addr::from(array_at::<4>(packet, 12)).into(),
        Version::V6 => Ipv6Addr::from(array_at::<16>(packet, 8)).into(),
    })
}

/// TTL or hop limit; `None` when this is no IP packet.
pub(crate) fn hops(packet: &[u8]) -> Option<u8> {
    Some(match version(packet)? {
        Version::V4 => *packet.get(8)?,
        Version::V6 => *packet.get(7)?,
    })
}

/// What follows the UDP header; `None` for other packets, later fragments, and IPv6 with extension headers.
pub(crate) fn udp_payload(packet: &[u8]) -> Option<&[u8]> {
    const UDP: u8 = 17;
    const UDP_HEADER: usize = 8;
    let header = match version(packet)? {
        Version::V4 => {
            let offset = u16::from_be_bytes(array_at(packet, 6)) & 0x1fff;
            let header = usize::from(packet.first()? & 15) * 4;
            (offset == 0 && *packet.get(9)? == UDP).then_some(header)?
        }
        Version::V6 => (*packet.get(6)? == UDP).then_some(V6_HEADER)?,
    };
    packet.get(header + UDP_HEADER..)
}

/// Where the TCP header begins, and the length of an IP header without options; `None` for other packets, later
/// fragments, and IPv6 with extension headers.
#[inline]
pub(crate) fn tcp(packet: &[u8]) -> Option<(usize, u16)> {
    const TCP: u8 = 6;
    match version(packet)? {
        Version::V4 => {
            let offset = u16::from_be_bytes(array_at(packet, 6)) & 0x1fff;
            let header = usize::from(packet.first()? & 15) * 4;
            (offset == 0 && *packet.get(9)? == TCP && header >= V4_HEADER).then_some((header, 20))
        }
        Version::V6 => (*packet.get(6)? == TCP).then_some((V6_HEADER, 40)),
    }
}

/// Length of the IP packet at the start of `padded`, by its own header; `None` when it does not fit.
pub(crate) fn length(padded: &[u8]) -> Option<usize> {
    //@ C-IN-3
    let len = match version(padded)? {
        Version::V4 => {
            let total = usize::from(u16::from_be_bytes(array_at(padded, 2)));
            (total >= V4_HEADER).then_some(total)?
        }
        // Computed wide: 65535 + 40 does not fit 16 bits.
        Version::V6 => usize::from(u16::from_be_bytes(array_at(padded, 4))) + V6_HEADER,
    };
    (len <= padded.len()).then_some(len)
}

/// ECN bits of the inner header.
pub(crate) fn ecn(packet: &[u8]) -> Ecn {
    match version(packet) {
        Some(Version::V4) => Ecn::from_bits(array_at::<2>(packet, 0)[1]),
        Some(Version::V6) => Ecn::from_bits(array_at::<2>(packet, 0)[1] >> 4),
        None => Ecn::NotEct,
    }
}

/// What the outer header shows of the inner mark: CE is not carried outward (RFC 6040, C-OUT-4).
pub(crate) fn encapsulated(inner: Ecn) -> Ecn {
    //@ C-OUT-4
    if inner == Ecn::Ce { Ecn::Ect0 } else { inner }
}

/// Carries a mark of the outer header into the packet (RFC 6040, C-IN-5).
pub(crate) fn decapsulate(packet: &mut [u8], outer: Ecn) {
    //@ C-IN-5
    let mark = match (ecn(packet), outer) {
        (Ecn::Ect0 | Ecn::Ect1, Ecn::Ce) => Ecn::Ce,
        (Ecn::Ect0, Ecn::Ect1) => Ecn::Ect1,
        _ => return,
    } as u8;
    match version(packet) {
        Some(Version::V4) => {
            let old = u16::from_be_bytes(array_at(packet, 0));
            let new = (old & !3) | u16::from(mark);
            let sum = u16::from_be_bytes(array_at(packet, 10));
            crate::wire::put(packet, 0, &new.to_be_bytes());
            crate::wire::put(packet, 10, &checksum::updated(sum, old, new).to_be_bytes());
        }
        Some(Version::V6) => {
            let [first, second] = array_at(packet, 0);
            crate::wire::put(packet, 0, &[first, (second & !0x30) | (mark << 4)]);
        }
        None => {}
    }
}

#[cfg(test)]
#[path = "../tests/unit/ip.rs"]
mod tests;
