//! The Internet checksum (RFC 1071): sums, pseudo headers, and completing what the kernel left to us.

use crate::wire::{array_at, put};

/// One's complement sum of `bytes` in native byte order, not folded; an odd last byte is padded with zero.
///
/// The order does not matter: one's complement addition commutes with byte swaps (RFC 1071, 2B).
fn raw(bytes: &[u8]) -> u64 {
    let word = |b: &[u8; 4]| u64::from(u32::from_ne_bytes(*b));
    // Four accumulators, so that the additions do not wait for each other.
    let mut lanes = [0u64; 4];
    let (blocks, rest) = bytes.as_chunks::<16>();
    for block in blocks {
        let (words, _) = block.as_chunks::<4>();
        for (lane, w) in lanes.iter_mut().zip(words) {
            // 2^32 of these fit a lane; a packet has 2^14 at most.
            *lane = lane.wrapping_add(word(w));
        }
    }
    let (words, tail) = rest.as_chunks::<4>();
    let mut sum = words.iter().map(word).fold(0, u64::wrapping_add);
    let mut last = [0; 4];
    put(&mut last, 0, tail);
    sum = sum.wrapping_add(word(&last));
    lanes.into_iter().fold(sum, u64::wrapping_add)
}

const fn fold(mut sum: u64) -> u16 {
    sum = (sum & 0xffff_ffff) + (sum >> 32);
    sum = (sum & 0xffff) + ((sum >> 16) & 0xffff) + (sum >> 32);
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    sum as u16
}

/// Folded one's complement sum of `bytes` on top of `start`, both big-endian numbers; not complemented.
pub(crate) fn sum(bytes: &[u8], start: u16) -> u16 {
    fold(raw(bytes) + u64::from(start.to_be())).to_be()
}

/// The checksum field of an IPv4 header whose own field is zero.
pub(crate) fn header(ipv4: &[u8]) -> u16 {
    !sum(ipv4, 0)
}

/// A checksum field after one 16-bit word that it covers has changed (RFC 1624: HC' = ~(~HC + ~m + m')).
pub(crate) const fn updated(field: u16, old: u16, new: u16) -> u16 {
    let mut acc = !field as u32 + !old as u32 + new as u32;
    acc = (acc & 0xffff) + (acc >> 16);
    acc = (acc & 0xffff) + (acc >> 16);
    !(acc as u16)
}

/// Sum of the TCP or UDP pseudo header: addresses, protocol and length of the transport part.
pub(crate) fn pseudo(addresses: &[u8], protocol: u8, len: u16) -> u16 {
    let [hi, lo] = len.to_be_bytes();
    sum(addresses, sum(&[0, protocol, hi, lo], 0))
}

/// Completes a checksum that holds only the pseudo-header sum (`VIRTIO_NET_HDR_F_NEEDS_CSUM`): `start` is
/// where the transport header begins, `offset` where its checksum field lies in it. `None`: out of bounds.
pub(crate) fn complete(packet: &mut [u8], start: usize, offset: usize) -> Option<()> {
    let part = packet.get_mut(start..)?;
    (part.len() >= offset.checked_add(2)?).then_some(())?;
    let field = !sum(part, 0);
    put(part, offset, &wire_form(field, offset).to_be_bytes());
    Some(())
}

/// UDP (field at 6) sends a computed zero as 0xffff: zero says "no checksum" (RFC 768).
pub(crate) const fn wire_form(field: u16, offset: usize) -> u16 {
    if field == 0 && offset == 6 { 0xffff } else { field }
}

/// Is the transport checksum right? `pseudo` as from [`pseudo`], `part` the transport header and payload.
pub(crate) fn valid(part: &[u8], pseudo: u16) -> bool {
    sum(part, pseudo) == 0xffff
}

/// The 16-bit big-endian number at `at`.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(array_at(bytes, at))
}
