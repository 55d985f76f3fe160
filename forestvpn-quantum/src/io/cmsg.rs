//! What travels beside a datagram, as the kernel lays it out in memory: addresses, the local address it
//! reached or shall leave from, its ECN bits. Only bytes in and out, for `udp`.

use std::mem::size_of;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use crate::batch::{Ecn, Envelope, LocalAddr, canonical};

/// Bytes of a `sockaddr_in6`, the longer of the two.
pub(super) const NAME_LEN: usize = 28;
/// `struct cmsghdr`: a length of the size of a pointer, then two ints.
const HEADER: usize = size_of::<usize>() + 8;

/// Room for the control messages of one datagram; those that are asked for take half of it.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(8))]
pub(super) struct Control(pub(super) [u8; 128]);

/// What the control messages of a received datagram say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Arrival {
    pub(super) local: Option<LocalAddr>,
    pub(super) ecn: Ecn,
    /// Length of each datagram, when the kernel handed over several as one (`UDP_GRO`).
    pub(super) stride: Option<usize>,
}

/// Reads the control messages of a received datagram. Unknown ones are skipped; a malformed one ends it.
pub(super) fn parse(mut control: &[u8]) -> Arrival {
    let mut found = Arrival::default();
    while let Some((len, level, kind)) = header(control) {
        let Some(data) = control.get(HEADER..len) else { break };
        match (level, kind) {
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => found.local = pktinfo4(data),
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => found.local = pktinfo6(data),
            // One byte from IPv4, an int from IPv6.
            (libc::IPPROTO_IP, libc::IP_TOS) | (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                found.ecn = match *data {
                    [tos] => Ecn::from_bits(tos),
                    [a, b, c, d, ..] => Ecn::from_bits((i32::from_ne_bytes([a, b, c, d]) & 3) as u8),
                    _ => Ecn::NotEct,
                };
            }
            // An int, whatever older documentation says.
            (libc::SOL_UDP, libc::UDP_GRO) => {
                let size = data.first_chunk().map(|size| i32::from_ne_bytes(*size));
                found.stride = size.and_then(|size| usize::try_from(size).ok()).filter(|&size| size > 0);
            }
            _ => {}
        }
        control = control.get(len.next_multiple_of(size_of::<usize>())..).unwrap_or_default();
    }
    found
}

fn header(control: &[u8]) -> Option<(usize, i32, i32)> {
    let (len, rest) = control.split_first_chunk()?;
    let (level, rest) = rest.split_first_chunk()?;
    let kind = rest.first_chunk()?;
    let len = usize::from_ne_bytes(*len);
    // A length below that of the header would be read for ever.
    (HEADER..=control.len())
        .contains(&len)
        .then(|| (len, i32::from_ne_bytes(*level), i32::from_ne_bytes(*kind)))
}

/// `struct in_pktinfo`: interface, the local address that an answer should have, destination in the header.
fn pktinfo4(data: &[u8]) -> Option<LocalAddr> {
    let (ifindex, rest) = data.split_first_chunk()?;
    let ip = Ipv4Addr::from(*rest.first_chunk::<4>()?);
    (!ip.is_unspecified()).then(|| LocalAddr { ip: ip.into(), ifindex: u32::from_ne_bytes(*ifindex) })
}

/// `struct in6_pktinfo`: destination, interface. Nothing can be sent from a multicast address.
fn pktinfo6(data: &[u8]) -> Option<LocalAddr> {
    let (ip, rest) = data.split_first_chunk::<16>()?;
    let ip = Ipv6Addr::from(*ip);
    let ifindex = u32::from_ne_bytes(*rest.first_chunk()?);
    (!ip.is_unspecified() && !ip.is_multicast()).then(|| LocalAddr { ip: ip.into(), ifindex })
}

/// Lays out what goes with a datagram: the local address, when one is given and of the family of the remote one,
/// TOS and TTL where they are not the default, and the length of each datagram when there are several. Gives the
/// length; 0 when the kernel's choice will do.
pub(super) fn build(control: &mut Control, envelope: &Envelope, segment: Option<u16>) -> usize {
    let mut room: &mut [u8] = &mut control.0;
    let mut used = 0;
    let (remote, v4) = (envelope.to.remote, envelope.to.remote.is_ipv4());
    match (remote, envelope.to.local.map(|l| (l.ip, l.ifindex))) {
        (SocketAddr::V4(_), Some((IpAddr::V4(ip), ifindex))) => {
            let mut info = [0; 12];
            info[..4].copy_from_slice(&ifindex.to_ne_bytes());
            info[4..8].copy_from_slice(&ip.octets());
            used += put(&mut room, libc::IPPROTO_IP, libc::IP_PKTINFO, &info);
        }
        (SocketAddr::V6(_), Some((IpAddr::V6(ip), _))) => {
            // Without the interface: routing decides, as in the kernel's driver. A link-local peer's address
            // carries its own scope.
            let mut info = [0; 20];
            info[..16].copy_from_slice(&ip.octets());
            used += put(&mut room, libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &info);
        }
        _ => {}
    }
    let level = if v4 { libc::IPPROTO_IP } else { libc::IPPROTO_IPV6 };
    if envelope.tos != 0 {
        let kind = if v4 { libc::IP_TOS } else { libc::IPV6_TCLASS };
        used += put(&mut room, level, kind, &i32::from(envelope.tos).to_ne_bytes());
    }
    if let Some(hops) = envelope.hops {
        let kind = if v4 { libc::IP_TTL } else { libc::IPV6_HOPLIMIT };
        used += put(&mut room, level, kind, &i32::from(hops).to_ne_bytes());
    }
    if let Some(segment) = segment {
        used += put(&mut room, libc::SOL_UDP, libc::UDP_SEGMENT, &segment.to_ne_bytes());
    }
    used
}

fn put(room: &mut &mut [u8], level: i32, kind: i32, data: &[u8]) -> usize {
    let len = HEADER + data.len();
    let space = len.next_multiple_of(size_of::<usize>());
    let Some((message, rest)) = std::mem::take(room).split_at_mut_checked(space) else { return 0 };
    let (header, body) = message.split_at_mut(HEADER);
    let (size, kinds) = header.split_at_mut(size_of::<usize>());
    size.copy_from_slice(&len.to_ne_bytes());
    let (first, second) = kinds.split_at_mut(4);
    first.copy_from_slice(&level.to_ne_bytes());
    second.copy_from_slice(&kind.to_ne_bytes());
    let (said, padding) = body.split_at_mut(data.len());
    said.copy_from_slice(data);
    padding.fill(0);
    *room = rest;
    space
}

/// `struct sockaddr_in` or `sockaddr_in6`, and its length.
pub(super) fn encode(addr: SocketAddr) -> ([u8; NAME_LEN], usize) {
    let mut name = [0; NAME_LEN];
    name[2..4].copy_from_slice(&addr.port().to_be_bytes());
    match addr {
        SocketAddr::V4(v4) => {
            name[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
            name[4..8].copy_from_slice(&v4.ip().octets());
            (name, 16)
        }
        SocketAddr::V6(v6) => {
            name[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
            name[8..24].copy_from_slice(&v6.ip().octets());
            name[24..].copy_from_slice(&v6.scope_id().to_ne_bytes());
            (name, NAME_LEN)
        }
    }
}

/// The address that the kernel wrote; never an IPv4-mapped one.
pub(super) fn decode(name: &[u8; NAME_LEN]) -> Option<SocketAddr> {
    let port = u16::from_be_bytes([name[2], name[3]]);
    match u16::from_ne_bytes([name[0], name[1]]).into() {
        libc::AF_INET => {
            let ip: [u8; 4] = name[4..8].try_into().ok()?;
            Some((Ipv4Addr::from(ip), port).into())
        }
        libc::AF_INET6 => {
            let ip: [u8; 16] = name[8..24].try_into().ok()?;
            let scope = u32::from_ne_bytes(name[24..].try_into().ok()?);
            Some(canonical(SocketAddrV6::new(ip.into(), port, 0, scope).into()))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::Endpoint;

    fn local(ip: &str, ifindex: u32) -> Option<LocalAddr> {
        Some(LocalAddr { ip: ip.parse().unwrap(), ifindex })
    }

    fn built(remote: &str, local: Option<LocalAddr>, ecn: Ecn) -> Vec<u8> {
        let mut control = Control([0xff; 128]);
        let to = Endpoint { remote: remote.parse().unwrap(), local };
        let len = build(&mut control, &Envelope { tos: ecn as u8, ..Envelope::new(to) }, None);
        control.0[..len].to_vec()
    }

    #[test]
    fn what_is_built_for_sending_reads_back_as_what_arrived() {
        let four = built("192.0.2.1:1", local("192.0.2.9", 7), Ecn::Ect0);
        assert_eq!(parse(&four), Arrival { local: local("192.0.2.9", 7), ecn: Ecn::Ect0, stride: None });
        // IPv6 leaves the interface to routing.
        let six = built("[2001:db8::1]:1", local("2001:db8::9", 7), Ecn::Ce);
        assert_eq!(parse(&six), Arrival { local: local("2001:db8::9", 0), ecn: Ecn::Ce, stride: None });
    }

    #[test]
    fn nothing_to_say_takes_no_control_message() {
        assert!(built("192.0.2.1:1", None, Ecn::NotEct).is_empty());
        assert!(built("192.0.2.1:1", local("2001:db8::9", 0), Ecn::NotEct).is_empty());
        assert!(built("[2001:db8::1]:1", local("192.0.2.9", 0), Ecn::NotEct).is_empty());
    }

    #[test]
    fn tos_is_read_as_one_byte_or_as_an_int() {
        let mut control = Control([0; 128]);
        let mut room: &mut [u8] = &mut control.0;
        let len = put(&mut room, libc::IPPROTO_IP, libc::IP_TOS, &[0xb9]);
        assert_eq!(parse(&control.0[..len]).ecn, Ecn::Ect1);
        assert_eq!(parse(&built("192.0.2.1:1", None, Ecn::Ect1)).ecn, Ecn::Ect1);
    }

    #[test]
    fn every_truncation_and_every_wrong_length_is_survived() {
        let good = built("192.0.2.1:1", local("192.0.2.9", 7), Ecn::Ect0);
        for cut in 0..good.len() {
            let _ = parse(&good[..cut]);
        }
        for len in [0, 1, HEADER - 1, good.len() + 1, usize::MAX] {
            let mut bad = good.clone();
            bad[..size_of::<usize>()].copy_from_slice(&len.to_ne_bytes());
            assert_eq!(parse(&bad), Arrival::default());
        }
    }

    #[test]
    fn addresses_survive_the_way_there_and_back_and_mapped_ones_become_ipv4() {
        for text in ["192.0.2.1:51820", "[2001:db8::1]:9", "[fe80::1%3]:9"] {
            let addr: SocketAddr = text.parse().unwrap();
            assert_eq!(decode(&encode(addr).0), Some(addr));
        }
        let mapped: SocketAddr = "[::ffff:192.0.2.1]:5".parse().unwrap();
        assert_eq!(decode(&encode(mapped).0), Some("192.0.2.1:5".parse().unwrap()));
        assert_eq!(decode(&[0; NAME_LEN]), None);
    }

    #[test]
    fn unusable_sources_are_not_kept() {
        assert_eq!(pktinfo4(&[0; 12]), None);
        let mut info = [0; 20];
        info[..16].copy_from_slice(&"ff02::1".parse::<Ipv6Addr>().unwrap().octets());
        assert_eq!(pktinfo6(&info), None);
    }
}
