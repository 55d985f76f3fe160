//! Random session indices (C-IDX): who does the receiver index of a message belong to?

use core::hash::{BuildHasherDefault, Hasher};
use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::device::PeerId;
use crate::time::Entropy;

/// What an index stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// An initiation that waits for its response.
    Handshake,
    /// A keypair: previous, current or next.
    Keypair,
}

/// Spreads an index that is random already.
#[derive(Default)]
struct Spread(u64);

//@ C-IDX-5
impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|b| self.0 = self.0.rotate_left(8) ^ u64::from(*b));
    }
    fn write_u32(&mut self, index: u32) {
        self.0 = u64::from(index).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// All live indices of a device; at most four per peer (C-IDX-4).
#[derive(Default)]
pub(crate) struct Indices(HashMap<u32, (PeerId, Kind), BuildHasherDefault<Spread>>);

impl Indices {
    /// A new index, unlike any other that is alive.
    pub(crate) fn allocate(&mut self, peer: PeerId, kind: Kind, entropy: &mut dyn Entropy) -> u32 {
        //@ C-IDX-1
        loop {
            let mut bytes = [0; 4];
            entropy.fill(&mut bytes);
            let index = u32::from_ne_bytes(bytes);
            if let Entry::Vacant(free) = self.0.entry(index) {
                free.insert((peer, kind));
                return index;
            }
        }
    }

    /// The handshake became a keypair, in one step (C-IDX-2).
    pub(crate) fn promote(&mut self, index: u32) {
        //@ C-IDX-2
        if let Some((_, kind)) = self.0.get_mut(&index) {
            *kind = Kind::Keypair;
        }
    }

    pub(crate) fn free(&mut self, index: Option<u32>) {
        if let Some(index) = index {
            self.0.remove(&index);
        }
    }

    /// The peer whose handshake waits under `index`; responses look nowhere else (C-IDX-3).
    pub(crate) fn handshake(&self, index: u32) -> Option<PeerId> {
        //@ C-IDX-3
        self.0.get(&index).filter(|(_, kind)| *kind == Kind::Handshake).map(|(peer, _)| *peer)
    }

    /// The peer whose keypair is called `index`; data looks nowhere else (C-IDX-3).
    pub(crate) fn keypair(&self, index: u32) -> Option<PeerId> {
        self.0.get(&index).filter(|(_, kind)| *kind == Kind::Keypair).map(|(peer, _)| *peer)
    }

    /// Either; cookie replies answer both kinds of message.
    pub(crate) fn any(&self, index: u32) -> Option<PeerId> {
        self.0.get(&index).map(|(peer, _)| *peer)
    }

    /// How many indices are alive.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
#[path = "../tests/unit/index.rs"]
mod tests;
