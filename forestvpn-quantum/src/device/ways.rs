//! For threads that carry packets beside the one that owns the device: which way packets to each peer go now, what
//! changed of that, and what those threads sent.

use std::sync::Arc;

use ipnet::IpNet;

use super::{Device, PeerId};
use crate::batch::{Endpoint, Outbox};
use crate::mss::Mss;
use crate::session::SealKey;
use crate::time::{Instant, Now};

/// A change of the prefixes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RouteEdit {
    Insert(IpNet, PeerId),
    Remove(IpNet, PeerId),
    RemovePeer(PeerId),
}

/// What changed since it was asked for last, noted while somebody watches.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    watched: bool,
    /// Peers that may go another way now.
    pub(crate) touched: Vec<PeerId>,
    pub(crate) routes: Vec<RouteEdit>,
}

impl Changes {
    pub(super) fn route(&mut self, edit: RouteEdit) {
        if self.watched {
            self.routes.push(edit);
        }
    }

    /// Both lists were worked off.
    pub(crate) fn clear(&mut self) {
        self.touched.clear();
        self.routes.clear();
    }
}

/// The way of a peer's packets.
#[derive(Clone, Copy)]
pub(crate) struct WayNow<'d> {
    pub(crate) endpoint: Option<Endpoint>,
    /// `None`: packets wait, or will have to.
    pub(crate) key: Option<&'d Arc<SealKey>>,
}

impl Device {
    /// From now on changes are noted. To be called while there are no peers yet.
    pub(crate) const fn watch(&mut self) {
        self.changes.watched = true;
    }

    pub(crate) const fn changes(&mut self) -> &mut Changes {
        &mut self.changes
    }

    pub(crate) const fn mtu(&self) -> u16 {
        self.config.mtu
    }

    pub(crate) const fn mss(&self) -> Mss {
        self.config.mss
    }

    /// The peer may go another way now.
    #[inline]
    pub(super) fn touch(&mut self, id: PeerId) {
        if self.changes.watched
            && let Some(entry) = self.peers.get_mut(id)
            && !entry.touched
        {
            entry.touched = true;
            self.changes.touched.push(id);
        }
    }

    /// Which way packets to the peer go now; `None`: there is no such peer. From then on changes are noted again.
    pub(crate) fn way(&mut self, id: PeerId, now: Instant) -> Option<WayNow<'_>> {
        let entry = self.peers.get_mut(id)?;
        entry.touched = false;
        let peer = &entry.peer;
        let key = peer.seal_key(now).filter(|_| peer.staging.is_empty());
        Some(WayNow { endpoint: peer.endpoint, key })
    }

    /// Others sent packets to the peer with its current key, the last one `at` this time: `bytes` more of datagrams than
    /// was told before, fewer if some were not sent after all.
    pub(crate) fn carried(&mut self, id: PeerId, bytes: i64, at: Instant, now: Now, out: &mut impl Outbox) {
        let Some(entry) = self.peers.get_mut(id) else { return };
        let rekey = entry.peer.carried(at, bytes, now.mono);
        self.after_send(id, rekey, now, out);
    }
}
