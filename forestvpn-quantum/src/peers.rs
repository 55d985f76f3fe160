//! The table of peers: by id for packets, by public key for handshakes and configuration.

use std::collections::BTreeMap;

use crate::device::PeerId;
use crate::key::PublicKey;
use crate::peer::Peer;
use crate::time::Instant;

/// Most peers of one device (C-IDX-4).
pub(crate) const MAX_PEERS: usize = 1 << 20;
const SLOT_BITS: u32 = 20;
const SLOT_MASK: u32 = (1 << SLOT_BITS) - 1;

/// A peer and what the device keeps about it.
pub(crate) struct Entry {
    pub(crate) peer: Peer,
    /// Order of creation, for listings.
    pub(crate) created: u64,
    /// The deadline that stands for this peer in the device's heap; `Instant::MAX` = none.
    pub(crate) queued: Instant,
    /// It may go another way than was last told, and that is noted.
    pub(crate) touched: bool,
}

/// All peers. An id is a slot and a generation, so that the id of a removed peer names nobody else.
#[derive(Default)]
pub(crate) struct Peers {
    slots: Vec<(u32, Option<Box<Entry>>)>,
    free: Vec<u32>,
    // A tree, not a hash table: keys may be chosen by strangers in a provider setting, and a tree has no
    // worst case to attack (C-IDX-5).
    by_key: BTreeMap<PublicKey, PeerId>,
    created: u64,
}

impl Peers {
    pub(crate) fn len(&self) -> usize {
        self.by_key.len()
    }

    pub(crate) fn find(&self, key: &PublicKey) -> Option<PeerId> {
        //@ C-IDX-5
        self.by_key.get(key).copied()
    }

    pub(crate) fn get(&self, id: PeerId) -> Option<&Entry> {
        let (generation, entry) = self.slots.get((id.raw() & SLOT_MASK) as usize)?;
        entry.as_deref().filter(|_| *generation == id.raw() >> SLOT_BITS)
    }

    pub(crate) fn get_mut(&mut self, id: PeerId) -> Option<&mut Entry> {
        let (generation, entry) = self.slots.get_mut((id.raw() & SLOT_MASK) as usize)?;
        entry.as_deref_mut().filter(|_| *generation == id.raw() >> SLOT_BITS)
    }

    /// `None` when the table is full.
    pub(crate) fn insert(&mut self, peer: Peer) -> Option<PeerId> {
        //@ C-IDX-4
        if self.len() >= MAX_PEERS {
            return None;
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push((0, None));
            self.slots.len() as u32 - 1
        });
        let (generation, entry) = self.slots.get_mut(slot as usize)?;
        let id = PeerId::from_raw((*generation << SLOT_BITS) | slot);
        self.by_key.insert(peer.public, id);
        self.created += 1;
        *entry = Some(Box::new(Entry { peer, created: self.created, queued: Instant::MAX, touched: false }));
        Some(id)
    }

    pub(crate) fn remove(&mut self, id: PeerId) -> Option<Box<Entry>> {
        let slot = id.raw() & SLOT_MASK;
        let (generation, entry) = self.slots.get_mut(slot as usize)?;
        if *generation != id.raw() >> SLOT_BITS {
            return None;
        }
        let entry = entry.take()?;
        *generation = (*generation + 1) & (u32::MAX >> SLOT_BITS);
        self.free.push(slot);
        self.by_key.remove(&entry.peer.public);
        Some(entry)
    }

    /// Ids in no particular order.
    pub(crate) fn ids(&self) -> Vec<PeerId> {
        self.by_key.values().copied().collect()
    }

    /// Ids in order of creation.
    pub(crate) fn ids_by_age(&self) -> Vec<PeerId> {
        let mut ids = self.ids();
        ids.sort_by_key(|id| self.get(*id).map(|e| e.created));
        ids
    }
}
