//! A super-packet as the kernel hands it over, cut into the packets it stands for.
//!
//! Each segment is written once, where it will be sealed. Of the virtio header only `gso_size`, `csum_start`
//! and `csum_offset` are believed, after they were held against the packet itself: `hdr_len` is wrong for
//! forwarded packets.

use super::checksum::{self, u16_at};
use crate::batch::Frame;
use crate::event::Discard;
use crate::offload::VnetHdr;
use crate::wire::put;

const TCP: u8 = 6;
const UDP: u8 = 17;
const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const CWR: u8 = 0x80;

/// How a frame is to be cut: into one packet, itself, or into segments.
#[derive(Debug)]
pub(crate) struct Splitter<'b> {
    headers: &'b [u8],
    payload: &'b [u8],
    /// Payload bytes per segment.
    size: usize,
    /// `None`: a plain packet, which is all payload.
    layers: Option<Layers>,
}

/// What the headers of a super-packet are.
#[derive(Clone, Copy, Debug)]
struct Layers {
    /// Where the transport header starts.
    transport: usize,
    ipv6: bool,
    protocol: u8,
}

impl<'b> Splitter<'b> {
    /// Checks the description against the packet; of a plain packet, completes the checksum if asked to.
    #[inline(always)]
    pub(crate) fn new(frame: &'b mut Frame<'_>) -> Result<Self, Discard> {
        let hdr = frame.hdr;
        let splitter = if hdr.gso_type == VnetHdr::GSO_NONE {
            let (start, offset) = (hdr.csum_start.into(), hdr.csum_offset.into());
            if hdr.flags & VnetHdr::NEEDS_CSUM != 0 {
                checksum::complete(frame.bytes, start, offset).ok_or(Discard::BadOffload)?;
            }
            let payload = &*frame.bytes;
            (!payload.is_empty()).then_some(Self { headers: &[], payload, size: payload.len(), layers: None })
        } else {
            Self::check(&hdr, frame.bytes)
        };
        splitter.ok_or(Discard::BadOffload)
    }

    fn check(hdr: &VnetHdr, packet: &'b [u8]) -> Option<Self> {
        let ipv6 = match packet.first()? >> 4 {
            4 => false,
            6 => true,
            _ => return None,
        };
        let (protocol, offset, least) = match (hdr.gso_type & !VnetHdr::GSO_ECN, ipv6) {
            (VnetHdr::GSO_TCPV4, false) | (VnetHdr::GSO_TCPV6, true) => (TCP, 16, 20),
            (VnetHdr::GSO_UDP_L4, _) => (UDP, 6, 8),
            _ => return None,
        };
        let (transport, size) = (usize::from(hdr.csum_start), usize::from(hdr.gso_size));
        let fixed = if ipv6 { 40 } else { 20 };
        let checksummed = hdr.flags & VnetHdr::NEEDS_CSUM != 0 && usize::from(hdr.csum_offset) == offset;
        if !checksummed || size == 0 || transport < fixed || packet.len() < transport + least {
            return None;
        }
        if !ipv6 && usize::from(packet.first()? & 15) * 4 != transport {
            return None;
        }
        let length = match protocol {
            TCP => usize::from(packet.get(transport + 12)? >> 4) * 4,
            _ => least,
        };
        (length >= least).then_some(())?;
        let (headers, payload) = packet.split_at_checked(transport + length)?;
        let layers = Some(Layers { transport, ipv6, protocol });
        (!payload.is_empty()).then_some(Self { headers, payload, size, layers })
    }

    /// How many packets the super-packet stands for.
    pub(crate) fn count(&self) -> usize {
        self.payload.len().div_ceil(self.size)
    }

    /// Length of packet `i`; all but the last are equal.
    pub(crate) fn len(&self, i: usize) -> usize {
        let rest = self.payload.len().saturating_sub(i.saturating_mul(self.size));
        self.headers.len() + rest.min(self.size)
    }

    /// Writes packet `i`, which takes [`len`](Self::len) bytes of `out`, with all headers and checksums right.
    pub(crate) fn write(&self, i: usize, out: &mut [u8]) -> Option<()> {
        let len = self.len(i);
        let at = i.checked_mul(self.size)?;
        let payload = self.payload.get(at..)?;
        let payload = payload.get(..payload.len().min(self.size))?;
        let packet = out.get_mut(..len)?;
        let (headers, rest) = packet.split_at_mut_checked(self.headers.len())?;
        headers.copy_from_slice(self.headers);
        rest.copy_from_slice(payload);
        let Some(Layers { transport, ipv6, protocol }) = self.layers else { return Some(()) };
        let part = u16::try_from(len.checked_sub(transport)?).ok()?;
        let total = u16::try_from(len).ok()?;
        let addresses = if ipv6 {
            // Extension headers count as payload of the fixed 40 bytes.
            put(packet, 4, &total.checked_sub(40)?.to_be_bytes());
            8..40
        } else {
            put(packet, 2, &total.to_be_bytes());
            let id = u16_at(packet, 4).wrapping_add(i as u16);
            put(packet, 4, &id.to_be_bytes());
            put(packet, 10, &[0, 0]);
            let sum = checksum::header(packet.get(..transport)?);
            put(packet, 10, &sum.to_be_bytes());
            12..20
        };
        let pseudo = checksum::pseudo(packet.get(addresses)?, protocol, part);
        let last = i + 1 == self.count();
        let segment = packet.get_mut(transport..)?;
        let offset = if protocol == TCP {
            let seq = u32::from_be_bytes(crate::wire::array_at(segment, 4)).wrapping_add(at as u32);
            put(segment, 4, &seq.to_be_bytes());
            let flags = segment.get_mut(13)?;
            if !last {
                *flags &= !(FIN | PSH);
            }
            if i != 0 {
                *flags &= !CWR;
            }
            16
        } else {
            put(segment, 4, &part.to_be_bytes());
            6
        };
        put(segment, offset, &[0, 0]);
        let field = checksum::wire_form(!checksum::sum(segment, pseudo), offset);
        put(segment, offset, &field.to_be_bytes());
        Some(())
    }
}

#[cfg(test)]
#[path = "../../tests/unit/split.rs"]
mod tests;
