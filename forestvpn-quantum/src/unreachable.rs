//! ICMP's word to a sender whose packet has nowhere to go: host unreachable (RFC 792), address unreachable (RFC 4443).
//!
//! It comes from the address that was to be reached. The core knows no address of its host, and a kernel drops what
//! comes in by an interface under one of its own addresses.

use core::fmt;
use core::net::{Ipv4Addr, Ipv6Addr};
use core::time::Duration;

use crate::offload::checksum::{self, u16_at};
use crate::time::Instant;
use crate::wire::{array_at, put};

/// Most bytes of an answer: RFC 1812 4.3.2.3 and RFC 4443 2.4(c).
const V4_MOST: usize = 576;
const V6_MOST: usize = 1280;
const V4_HEADER: usize = 20;
const V6_HEADER: usize = 40;
const ICMP_HEADER: usize = 8;
const ICMP: u8 = 1;
const ICMP6: u8 = 58;
/// Precedence "internetwork control", as routers send such messages.
const CONTROL: u8 = 0xc0;
const HOPS: u8 = 64;

/// An IP packet for the sender of another one, see [`Device::unreachable`](crate::Device::unreachable).
pub struct Unreachable {
    bytes: [u8; V6_MOST],
    len: usize,
}

impl Unreachable {
    /// The whole packet.
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }

    /// About `packet`; `None` for those that must not be answered: errors of ICMP themselves, later fragments, what
    /// goes to many or comes from no single host, and what is no IP packet (RFC 1122 3.2.2, RFC 4443 2.4(e)).
    pub(crate) fn about(packet: &[u8]) -> Option<Self> {
        match packet.first()? >> 4 {
            4 if packet.len() >= V4_HEADER => v4(packet),
            6 if packet.len() >= V6_HEADER => v6(packet),
            _ => None,
        }
    }

    /// An empty packet that quotes as much of `packet` as fits, `headers` bytes in.
    fn quoting(packet: &[u8], headers: usize, most: usize) -> Self {
        let mut bytes = [0; V6_MOST];
        let quote = packet.get(..packet.len().min(most - headers)).unwrap_or_default();
        put(&mut bytes, headers, quote);
        Self { bytes, len: headers + quote.len() }
    }
}

impl fmt::Debug for Unreachable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unreachable").field("len", &self.len).finish_non_exhaustive()
    }
}

fn v4(packet: &[u8]) -> Option<Unreachable> {
    const UNREACHABLE: u8 = 3;
    const HOST: u8 = 1;
    let (source, destination): ([u8; 4], [u8; 4]) = (array_at(packet, 12), array_at(packet, 16));
    let one = |ip: Ipv4Addr| !matches!(ip.octets(), [0 | 127 | 224.., ..]);
    let first = u16_at(packet, 6) & 0x1fff == 0;
    (one(source.into()) && one(destination.into()) && first).then_some(())?;
    if *packet.get(9)? == ICMP {
        let kind = packet.get(usize::from(packet.first()? & 15) * 4)?;
        (!matches!(kind, 3 | 4 | 5 | 11 | 12)).then_some(())?;
    }
    let mut answer = Unreachable::quoting(packet, V4_HEADER + ICMP_HEADER, V4_MOST);
    let len = u16::try_from(answer.len).ok()?;
    let bytes = answer.bytes.get_mut(..answer.len)?;
    put(bytes, 0, &[0x45, CONTROL]);
    put(bytes, 2, &len.to_be_bytes());
    put(bytes, 8, &[HOPS, ICMP]);
    put(bytes, 12, &destination);
    put(bytes, 16, &source);
    let sum = checksum::header(bytes.get(..V4_HEADER)?);
    put(bytes, 10, &sum.to_be_bytes());
    put(bytes, V4_HEADER, &[UNREACHABLE, HOST]);
    let sum = !checksum::sum(bytes.get(V4_HEADER..)?, 0);
    put(bytes, V4_HEADER + 2, &sum.to_be_bytes());
    Some(answer)
}

fn v6(packet: &[u8]) -> Option<Unreachable> {
    const UNREACHABLE: u8 = 1;
    const ADDRESS: u8 = 3;
    let (source, destination): ([u8; 16], [u8; 16]) = (array_at(packet, 8), array_at(packet, 24));
    let from = Ipv6Addr::from(source);
    let one = !(from.is_unspecified() || from.is_loopback() || from.is_multicast());
    (one && !Ipv6Addr::from(destination).is_multicast() && may_be_answered(packet)?).then_some(())?;
    let mut answer = Unreachable::quoting(packet, V6_HEADER + ICMP_HEADER, V6_MOST);
    let len = u16::try_from(answer.len - V6_HEADER).ok()?;
    let bytes = answer.bytes.get_mut(..answer.len)?;
    put(bytes, 0, &[0x60 | CONTROL >> 4, CONTROL << 4]);
    put(bytes, 4, &len.to_be_bytes());
    put(bytes, 6, &[ICMP6, HOPS]);
    put(bytes, 8, &destination);
    put(bytes, 24, &source);
    put(bytes, V6_HEADER, &[UNREACHABLE, ADDRESS]);
    let pseudo = checksum::pseudo(bytes.get(8..V6_HEADER)?, ICMP6, len);
    let sum = !checksum::sum(bytes.get(V6_HEADER..)?, pseudo);
    put(bytes, V6_HEADER + 2, &sum.to_be_bytes());
    Some(answer)
}

/// Is this IPv6 packet neither an error or a redirect of ICMP nor a later fragment? `None`: it cannot be said.
fn may_be_answered(packet: &[u8]) -> Option<bool> {
    const HOP_BY_HOP: u8 = 0;
    const ROUTING: u8 = 43;
    const FRAGMENT: u8 = 44;
    const OPTIONS: u8 = 60;
    const REDIRECT: u8 = 137;
    let (mut next, mut at) = (*packet.get(6)?, V6_HEADER);
    // Each turn moves on by eight bytes or more.
    loop {
        let length = match next {
            HOP_BY_HOP | ROUTING | OPTIONS => usize::from(*packet.get(at + 1)?) * 8 + 8,
            FRAGMENT if packet.get(at + 2..at + 4).map(|field| u16_at(field, 0) >> 3)? > 0 => {
                return Some(false);
            }
            FRAGMENT => 8,
            ICMP6 => return packet.get(at).map(|&kind| kind >= 128 && kind != REDIRECT),
            _ => return Some(true),
        };
        next = *packet.get(at)?;
        at += length;
    }
}

/// How many answers may be sent: a burst of fifty, then a thousand a second (the kernel's `icmp_msgs_per_sec`).
#[derive(Debug)]
pub(crate) struct Pace {
    /// When the answers of all that were given would have been sent one after the other.
    done: Instant,
}

impl Pace {
    const EACH: Duration = Duration::from_millis(1);
    const BURST: Duration = Duration::from_millis(49);

    pub(crate) const fn new() -> Self {
        Self { done: Instant::ZERO }
    }

    /// May one more be sent now?
    pub(crate) fn allows(&self, now: Instant) -> bool {
        self.done <= now.after(Self::BURST)
    }

    /// One more was sent.
    pub(crate) fn spend(&mut self, now: Instant) {
        self.done = self.done.max(now).after(Self::EACH);
    }
}

#[cfg(test)]
#[path = "../tests/unit/unreachable.rs"]
mod tests;
