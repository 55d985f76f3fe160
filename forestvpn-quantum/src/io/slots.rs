//! Fixed receive memory for datagrams: small slots close together, and room for the rare long one.
//!
//! Slots of 64 KiB each would fit every datagram, but lie so far apart that all of them compete for the same
//! few lines of the processor's caches. So a datagram is read into a slot of 2 KiB, and only what does not fit
//! there goes on into a second area, which costs no memory until it is used. A long datagram is then put
//! together by one copy of 2 KiB: tunnels with an MTU up to 65 475 work (C-OUT-5), none is cut short.

use crate::batch::{Ecn, Endpoint, Received};

/// Bytes of a slot that lie close together.
const NEAR: usize = 2048;
/// Bytes of a datagram that fit in all; more than UDP can carry (65 527 over IPv6).
const WHOLE: usize = 65_536;

/// What one read put into one slot.
#[derive(Clone, Copy, Debug)]
pub struct RxMeta {
    /// Which slot.
    pub slot: usize,
    /// Bytes in the slot.
    pub len: usize,
    /// Length of each datagram but the last.
    pub stride: usize,
    /// Who sent it.
    pub from: Endpoint,
    /// ECN bits of the outer header.
    pub ecn: Ecn,
}

/// Memory for `count` datagrams or trains of up to 64 KiB, allocated once.
#[derive(Debug)]
pub struct RxSlots {
    near: Vec<u8>,
    far: Vec<u8>,
    metas: Vec<RxMeta>,
    count: usize,
    whole: usize,
}

impl RxSlots {
    /// Allocates `count` slots. About 2 KiB of memory each, up to 66 KiB once long datagrams came in.
    pub fn new(count: usize) -> Self {
        Self::with_whole(count, WHOLE)
    }

    /// With room for `whole` bytes per datagram; less than UDP can carry only in tests.
    pub(super) fn with_whole(count: usize, whole: usize) -> Self {
        Self {
            near: vec![0; count.saturating_mul(NEAR)],
            far: vec![0; count.saturating_mul(whole)],
            metas: Vec::with_capacity(count),
            count,
            whole,
        }
    }

    /// How many slots there are.
    pub const fn count(&self) -> usize {
        self.count
    }

    /// How many are filled.
    pub const fn filled(&self) -> usize {
        self.metas.len()
    }

    /// Forgets what was received.
    pub fn clear(&mut self) {
        self.metas.clear();
    }

    /// Where a datagram for slot `i` goes: its first bytes here, what does not fit there.
    pub fn buffers(&mut self, i: usize) -> Option<(&mut [u8], &mut [u8])> {
        let near = self.near.chunks_exact_mut(NEAR).nth(i)?;
        let far = self.far.chunks_exact_mut(self.whole).nth(i)?.get_mut(NEAR..)?;
        Some((near, far))
    }

    /// Notes that a slot was filled, in order of arrival, and puts a long datagram together. Slots beyond the
    /// last, and lengths beyond the slot, are not noted.
    pub fn push(&mut self, meta: RxMeta) {
        if meta.slot >= self.count || meta.len > self.whole || self.metas.len() >= self.count {
            return;
        }
        if meta.len > NEAR
            && let Some(near) = self.near.chunks_exact(NEAR).nth(meta.slot)
            && let Some(far) = self.far.chunks_exact_mut(self.whole).nth(meta.slot)
            && let Some(head) = far.get_mut(..NEAR)
        {
            head.copy_from_slice(near);
        }
        self.metas.push(meta);
    }

    /// Where what came in `i`-th lies in [`RxSlots::near`]; `None` when it is too long for that.
    pub fn place(&self, i: usize) -> Option<usize> {
        self.metas.get(i).filter(|meta| meta.len <= NEAR).map(|meta| meta.slot.saturating_mul(NEAR))
    }

    /// All of the slots' memory that lies close together, so that packets of several slots can be joined.
    pub fn near(&mut self) -> &mut [u8] {
        &mut self.near
    }

    /// What came in `i`-th, as the core wants it.
    pub fn received(&mut self, i: usize) -> Option<Received<'_>> {
        let meta = *self.metas.get(i)?;
        let slot = if meta.len > NEAR {
            self.far.chunks_exact_mut(self.whole).nth(meta.slot)
        } else {
            self.near.chunks_exact_mut(NEAR).nth(meta.slot)
        };
        let bytes = slot?.get_mut(..meta.len)?;
        Some(Received { bytes, stride: meta.stride, from: meta.from, ecn: meta.ecn })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(slots: &mut RxSlots, slot: usize, datagram: &[u8]) {
        let (near, far) = slots.buffers(slot).unwrap();
        let cut = datagram.len().min(near.len());
        near[..cut].copy_from_slice(&datagram[..cut]);
        far[..datagram.len() - cut].copy_from_slice(&datagram[cut..]);
        let from = Endpoint::new("192.0.2.1:7".parse().unwrap());
        slots.push(RxMeta { slot, len: datagram.len(), stride: datagram.len(), from, ecn: Ecn::NotEct });
    }

    #[test]
    //@test C-FMT-4
    fn datagrams_of_every_length_come_out_whole_and_in_order_of_arrival() {
        let mut slots = RxSlots::new(3);
        for len in [0, 1, 2047, 2048, 2049, 65_507, 65_527] {
            slots.clear();
            let long: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            fill(&mut slots, 2, &long);
            fill(&mut slots, 0, b"short");
            assert_eq!(slots.received(0).unwrap().bytes, long);
            assert_eq!(slots.received(1).unwrap().bytes, b"short");
            assert!(slots.received(2).is_none());
        }
    }

    #[test]
    fn impossible_lengths_and_slots_are_not_noted() {
        let mut slots = RxSlots::new(1);
        let from = Endpoint::new("192.0.2.1:7".parse().unwrap());
        slots.push(RxMeta { slot: 1, len: 1, stride: 1, from, ecn: Ecn::NotEct });
        slots.push(RxMeta { slot: 0, len: WHOLE + 1, stride: 1, from, ecn: Ecn::NotEct });
        assert_eq!(slots.filled(), 0);
    }
}
