//! Neighbouring TCP segments of one flow, joined into the super-packet the kernel's own GRO would make; UDP datagrams
//! of one size too, where that is asked for.
//!
//! Nothing is copied: a run keeps its first packet whole and takes the payloads of the others from where they
//! lie, for one gathering write. Only what the kernel would merge is merged, in order within every flow, and
//! only after each member's checksum was verified: a merged write makes the kernel compute it anew, which
//! would turn a corrupt segment into a valid one (C-IN-8).

use core::ops::Range;

use super::checksum::{self, u16_at};
use crate::batch::Span;
use crate::offload::VnetHdr;
use crate::wire::{array_at, put};

/// Runs of different flows that may be open at once; more flows than that just merge less.
const OPEN: usize = 8;
/// Most packets of one run: what one gathering write takes.
pub const MAX_PARTS: usize = 64;
const NONE: u32 = u32::MAX;

const TCP: u8 = 6;
const UDP: u8 = 17;
const UDP_HEADER: usize = 8;
const PSH: u8 = 0x08;
const ACK: u8 = 0x10;
const DF: u8 = 0x40;

/// What is known of a packet that may join others.
#[derive(Clone, Copy, Default)]
struct Segment {
    udp: bool,
    ipv6: bool,
    /// Length of the IP header.
    ip: usize,
    /// Length of IP and TCP or UDP header.
    headers: usize,
    payload: usize,
    seq: u32,
    flags: u8,
}

/// One write to the TUN device: packets of `spans` linked by index.
#[derive(Clone, Copy, Debug)]
struct Run {
    first: u32,
    last: u32,
    count: u32,
    total: u32,
    headers: u32,
    size: u32,
    next_seq: u32,
    open: bool,
    udp: bool,
    ipv6: bool,
}

/// Plans the writes for one batch of plaintext packets. Its memory is taken once and kept.
#[derive(Debug, Default)]
pub struct Coalescer {
    runs: Vec<Run>,
    /// For each span the next one of its run.
    next: Vec<u32>,
    /// Runs that may still grow, most recent last.
    open: Vec<u32>,
    udp: bool,
}

/// One planned write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write {
    /// The virtio header to send with it; all zeros for a single packet.
    pub hdr: VnetHdr,
    run: usize,
}

impl Coalescer {
    /// For batches of up to `spans` packets.
    pub fn new(spans: usize) -> Self {
        Self {
            runs: Vec::with_capacity(spans),
            next: Vec::with_capacity(spans),
            open: Vec::with_capacity(OPEN),
            udp: false,
        }
    }

    /// Whether UDP datagrams are joined, too.
    pub const fn set_udp(&mut self, on: bool) {
        self.udp = on;
    }

    /// Are UDP datagrams joined?
    pub const fn joins_udp(&self) -> bool {
        self.udp
    }

    /// Groups `spans` of `bytes` into writes, in order of arrival. Heads of merged runs are rewritten in
    /// place; use [`split_up`](Self::split_up) before writing the members of such a run singly.
    pub fn plan(&mut self, bytes: &[u8], spans: &[Span]) -> usize {
        self.runs.clear();
        self.next.clear();
        self.open.clear();
        self.next.resize(spans.len(), NONE);
        for (i, span) in spans.iter().enumerate() {
            let packet = bytes.get(range(span)).unwrap_or_default();
            self.place(i as u32, packet, bytes, spans);
        }
        self.runs.len()
    }

    fn place(&mut self, i: u32, packet: &[u8], bytes: &[u8], spans: &[Span]) {
        let Some((segment, mergeable)) = Segment::parse(packet, self.udp) else {
            if is_odd(packet, self.udp) {
                // Ports unknown: it may belong to any flow, so nothing may overtake it.
                self.open.clear();
            }
            self.start(i, packet, None);
            return;
        };
        let found = self.open.iter().position(|&r| self.same_flow(r, packet, &segment, bytes, spans));
        if let Some(at) = found {
            let r = self.open.get(at).copied().unwrap_or(NONE);
            if mergeable && self.join(r, i, packet, &segment, bytes, spans) {
                if self.runs.get(r as usize).is_some_and(|run| !run.open) {
                    self.open.remove(at);
                }
                return;
            }
            // Whatever cannot join ends the flow's run: later segments must not overtake it.
            self.open.remove(at);
        }
        self.start(i, packet, mergeable.then_some(segment));
    }

    fn start(&mut self, i: u32, packet: &[u8], segment: Option<Segment>) {
        let r = self.runs.len() as u32;
        let open = segment.is_some_and(|s| s.flags & PSH == 0);
        let segment = segment.unwrap_or_default();
        self.runs.push(Run {
            first: i,
            last: i,
            count: 1,
            total: packet.len() as u32,
            headers: segment.headers as u32,
            size: segment.payload as u32,
            next_seq: segment.seq.wrapping_add(segment.payload as u32),
            open,
            udp: segment.udp,
            ipv6: segment.ipv6,
        });
        if open {
            if self.open.len() == OPEN {
                self.open.remove(0);
            }
            self.open.push(r);
        }
    }

    fn same_flow(&self, r: u32, packet: &[u8], s: &Segment, bytes: &[u8], spans: &[Span]) -> bool {
        let Some(run) = self.runs.get(r as usize) else { return false };
        let Some(head) = spans.get(run.first as usize).and_then(|sp| bytes.get(range(sp))) else {
            return false;
        };
        let addresses = if s.ipv6 { 8..40 } else { 12..20 };
        let ports = s.ip..s.ip + 4;
        (run.ipv6, run.udp) == (s.ipv6, s.udp)
            && head.get(addresses.clone()) == packet.get(addresses)
            && head.get(ports.clone()) == packet.get(ports)
    }

    fn join(&mut self, r: u32, i: u32, packet: &[u8], s: &Segment, bytes: &[u8], spans: &[Span]) -> bool {
        let Some(run) = self.runs.get_mut(r as usize) else { return false };
        let fits = run.open
            && (s.udp || s.seq == run.next_seq)
            && s.headers as u32 == run.headers
            && s.payload as u32 <= run.size
            && run.total + s.payload as u32 <= 65_535
            && (run.count as usize) < MAX_PARTS;
        let last = spans.get(run.last as usize).and_then(|sp| bytes.get(range(sp)));
        if !fits || !last.is_some_and(|last| continues(last, packet, s)) {
            return false;
        }
        if let Some(next) = self.next.get_mut(run.last as usize) {
            *next = i;
        }
        run.last = i;
        run.count += 1;
        run.total += s.payload as u32;
        run.next_seq = s.seq.wrapping_add(s.payload as u32);
        run.open = s.payload as u32 == run.size && s.flags & PSH == 0;
        true
    }

    /// The write number `i` of the plan. The head of a merged run gets the lengths, flags and sums of the
    /// whole, so each write is to be taken once.
    pub fn write(&self, i: usize, bytes: &mut [u8], spans: &[Span]) -> Option<Write> {
        let run = self.runs.get(i)?;
        if run.count == 1 {
            return Some(Write { hdr: VnetHdr::default(), run: i });
        }
        let last = bytes.get(range(spans.get(run.last as usize)?))?;
        let ip = if run.ipv6 { 40 } else { 20 };
        let push = if run.udp { 0 } else { last.get(ip + 13)? & PSH };
        let head = bytes.get_mut(range(spans.get(run.first as usize)?))?;
        let part = u16::try_from(run.total as usize - ip).ok()?;
        let addresses = if run.ipv6 {
            put(head, 4, &part.to_be_bytes());
            8..40
        } else {
            put(head, 2, &(run.total as u16).to_be_bytes());
            put(head, 10, &[0, 0]);
            let sum = checksum::header(head.get(..20)?);
            put(head, 10, &sum.to_be_bytes());
            12..20
        };
        let pseudo = checksum::pseudo(head.get(addresses)?, if run.udp { UDP } else { TCP }, part);
        let (gso_type, csum_offset) = match (run.udp, run.ipv6) {
            (true, _) => (VnetHdr::GSO_UDP_L4, 6),
            (false, true) => (VnetHdr::GSO_TCPV6, 16),
            (false, false) => (VnetHdr::GSO_TCPV4, 16),
        };
        if run.udp {
            put(head, ip + 4, &part.to_be_bytes());
        } else {
            *head.get_mut(ip + 13)? |= push;
        }
        put(head, ip + usize::from(csum_offset), &pseudo.to_be_bytes());
        let hdr = VnetHdr {
            flags: VnetHdr::NEEDS_CSUM,
            gso_type,
            hdr_len: run.headers as u16,
            gso_size: run.size as u16,
            csum_start: ip as u16,
            csum_offset,
        };
        Some(Write { hdr, run: i })
    }

    /// The byte ranges a write gathers: the first packet whole, of the others the payload.
    pub fn parts<'p>(&'p self, write: &Write, spans: &'p [Span]) -> impl Iterator<Item = Range<usize>> + 'p {
        let run = self.runs.get(write.run);
        let headers = run.map_or(0, |r| r.headers as usize);
        self.members(write.run).enumerate().filter_map(move |(n, i)| {
            let at = range(spans.get(i)?);
            Some(if n == 0 { at } else { at.start + headers..at.end })
        })
    }

    /// Indices into `spans` of the packets of write `i`, in order.
    pub fn members(&self, i: usize) -> impl Iterator<Item = usize> + '_ {
        let first = self.runs.get(i).map(|r| r.first);
        core::iter::successors(first, |&i| self.next.get(i as usize).copied().filter(|&n| n != NONE))
            .map(|i| i as usize)
    }

    /// Gives the head of a merged write its own lengths, flags and checksums back, when the kernel refused
    /// the merged one: every member can then be written singly.
    pub fn split_up(&self, write: &Write, bytes: &mut [u8], spans: &[Span]) {
        let Some(run) = self.runs.get(write.run).filter(|r| r.count > 1) else { return };
        let Some(head) = spans.get(run.first as usize).and_then(|s| bytes.get_mut(range(s))) else { return };
        let ip: usize = if run.ipv6 { 40 } else { 20 };
        let part = (head.len() - ip.min(head.len())) as u16;
        if run.ipv6 {
            put(head, 4, &part.to_be_bytes());
        } else {
            let total = head.len() as u16;
            put(head, 2, &total.to_be_bytes());
            put(head, 10, &[0, 0]);
            let sum = checksum::header(head.get(..20).unwrap_or_default());
            put(head, 10, &sum.to_be_bytes());
        }
        if run.udp {
            put(head, ip + 4, &part.to_be_bytes());
        } else if let Some(flags) = head.get_mut(ip + 13) {
            // The head of a run of several never carried PSH itself: that would have ended the run.
            *flags &= !PSH;
        }
        let (protocol, offset) = if run.udp { (UDP, 6) } else { (TCP, 16) };
        put(head, ip + offset, &[0, 0]);
        let addresses = if run.ipv6 { 8..40 } else { 12..20 };
        let pseudo = checksum::pseudo(head.get(addresses).unwrap_or_default(), protocol, part);
        let field = !checksum::sum(head.get(ip..).unwrap_or_default(), pseudo);
        put(head, ip + offset, &checksum::wire_form(field, offset).to_be_bytes());
    }
}

fn range(span: &Span) -> Range<usize> {
    span.at as usize..span.at as usize + usize::from(span.len)
}

/// TCP, or UDP where that is joined, whose header cannot be read at the usual place: fragments, IP options, IPv6 extension
/// headers.
fn is_odd(packet: &[u8], udp: bool) -> bool {
    match packet.first().map(|b| b >> 4) {
        Some(4) => packet.get(9).is_some_and(|&protocol| protocol == TCP || (udp && protocol == UDP)),
        Some(6) => !packet.get(6).is_some_and(|&next| matches!(next, 58 | 59) || (!udp && next == UDP)),
        _ => false,
    }
}

impl Segment {
    /// A plain TCP packet, or with `udp` a plain UDP one, and whether it may join others at all.
    fn parse(packet: &[u8], udp: bool) -> Option<(Self, bool)> {
        let (ipv6, ip, protocol) = match packet.first()? {
            // No options, no fragment.
            0x45 if u16_at(packet, 6) & 0x3fff == 0 => (false, 20, *packet.get(9)?),
            b if b >> 4 == 6 => (true, 40, *packet.get(6)?),
            _ => return None,
        };
        match protocol {
            TCP => Self::tcp(packet, ipv6, ip),
            UDP if udp => Self::datagram(packet, ipv6, ip),
            _ => None,
        }
    }

    fn datagram(packet: &[u8], ipv6: bool, ip: usize) -> Option<(Self, bool)> {
        let part = packet.get(ip..)?;
        let payload = part.len().checked_sub(UDP_HEADER)?;
        let addresses = packet.get(if ipv6 { 8..40 } else { 12..20 })?;
        // Without a checksum nothing could be verified, and the kernel would make one.
        //@ C-IN-8
        let mergeable = payload > 0
            && usize::from(u16_at(part, 4)) == part.len()
            && u16_at(part, 6) != 0
            && checksum::valid(part, checksum::pseudo(addresses, UDP, u16_at(part, 4)));
        Some((Self { udp: true, ipv6, ip, headers: ip + UDP_HEADER, payload, seq: 0, flags: 0 }, mergeable))
    }

    fn tcp(packet: &[u8], ipv6: bool, ip: usize) -> Option<(Self, bool)> {
        let part = packet.get(ip..)?;
        let tcp = usize::from(part.get(12)? >> 4) * 4;
        if tcp < 20 || part.len() < tcp {
            return None;
        }
        let (headers, payload) = (ip + tcp, part.len() - tcp);
        let flags = *part.get(13)?;
        let seq = u32::from_be_bytes(array_at(part, 4));
        let segment = Self { udp: false, ipv6, ip, headers, payload, seq, flags };
        let addresses = packet.get(if ipv6 { 8..40 } else { 12..20 })?;
        // Pure ACKs, SYN, FIN, RST, URG, ECE and CWR stay alone.
        //@ C-IN-8
        let mergeable = payload > 0
            && flags & !PSH == ACK
            && u16::try_from(part.len())
                .is_ok_and(|len| checksum::valid(part, checksum::pseudo(addresses, TCP, len)));
        Some((segment, mergeable))
    }
}

/// Does `packet` differ from the one before it only in what a cut super-packet may differ in?
fn continues(last: &[u8], packet: &[u8], s: &Segment) -> bool {
    let same = |r: Range<usize>| last.get(r.clone()) == packet.get(r);
    let ip = if s.ipv6 {
        // Version, class, flow label, next header, hop limit.
        same(0..4) && same(6..8)
    } else {
        let id = u16_at(packet, 4) == u16_at(last, 4).wrapping_add(1);
        // TOS; flags and fragment; TTL and protocol; the ID counts unless DF makes it meaningless.
        same(0..2) && same(6..10) && (id || packet.get(6).is_some_and(|b| b & DF != 0))
    };
    // Acknowledgement and all options.
    ip && (s.udp || (same(s.ip + 8..s.ip + 12) && same(s.ip + 20..s.headers)))
}

#[cfg(test)]
#[path = "../../tests/unit/coalesce.rs"]
mod tests;
