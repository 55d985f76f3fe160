//! The cold door: configuration, read-back, up and down.

use core::fmt;

use ipnet::IpNet;

use super::ways::RouteEdit;
use super::{Device, PeerId};
use crate::batch::{Endpoint, Outbox};
use crate::config::{DeviceSnapshot, DeviceUpdate, PeerSnapshot, PeerUpdate};
use crate::key::{PrivateKey, PublicKey};
use crate::peer::{Local, Peer};
use crate::peers::MAX_PEERS;
use crate::time::Now;

/// Why a configuration was refused; nothing of it was applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigError {
    /// The device would have more peers than it can name.
    TooManyPeers,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooManyPeers => write!(f, "too many peers: at most {MAX_PEERS} fit one device"),
        }
    }
}

impl core::error::Error for ConfigError {}

impl Device {
    /// Whether [`Device::configure`] would take this update, for an owner that has more to change with it.
    ///
    /// # Errors
    /// As there.
    pub fn check(&self, update: &DeviceUpdate) -> Result<(), ConfigError> {
        let kept = if update.replace_peers { 0 } else { self.peers.len() };
        if kept + update.peers.len() > MAX_PEERS {
            let is_new = |p: &&PeerUpdate| update.replace_peers || self.peers.find(&p.public_key).is_none();
            let new = update.peers.iter().filter(is_new).count();
            if kept + new > MAX_PEERS {
                return Err(ConfigError::TooManyPeers);
            }
        }
        Ok(())
    }

    /// Nothing can be sent from the local address of `endpoint` any more: peers that would be answered from
    /// there are answered from wherever the kernel chooses (C-OUT-7).
    pub fn forget_local(&mut self, endpoint: Endpoint) {
        for id in self.peers.ids() {
            if self.peers.get(id).is_some_and(|e| e.peer.endpoint == Some(endpoint)) {
                self.forget_source(id);
            }
        }
    }

    /// Applies an update: the private key first, then removals, then peers in their order. Port and fwmark
    /// belong to the sockets; here their change only makes peers forget the local address they were reached
    /// at. Packets that this causes (keepalives, initiations) go to `out`.
    ///
    /// # Errors
    /// [`ConfigError`]; nothing was applied then.
    pub fn configure(
        &mut self,
        update: &DeviceUpdate,
        now: Now,
        out: &mut impl Outbox,
    ) -> Result<(), ConfigError> {
        self.check(update)?;
        self.recent = [None; 2];
        if let Some(key) = &update.private_key {
            self.set_private_key(key.as_ref(), now, out);
        }
        if update.listen_port.is_some() || update.fwmark.is_some() {
            //@ C-OUT-8
            self.peers.ids().into_iter().for_each(|id| self.forget_source(id));
        }
        if update.replace_peers {
            self.peers.ids().into_iter().for_each(|id| self.remove(id));
        }
        for peer in &update.peers {
            self.update_peer(peer, now, out);
        }
        self.recent = [None; 2];
        // Keepalives that were turned on are due now: the first of them go here, a bounded number per call.
        self.handle_timeout(now, out);
        Ok(())
    }

    fn set_private_key(&mut self, key: Option<&PrivateKey>, now: Now, out: &mut impl Outbox) {
        //@ C-HS-10
        if self.local.as_ref().map(|l| &l.private) == key {
            return;
        }
        let first = self.local.is_none() && self.up;
        self.local = key.map(|k| Local::new(k.clone(), self.config.train_cipher));
        if let Some(id) = self.local.as_ref().and_then(|l| self.peers.find(&l.public)) {
            self.remove(id);
        }
        // Handshakes in flight were made with the old key.
        self.waiting.clear();
        for id in self.peers.ids() {
            if let Some(entry) = self.peers.get_mut(id) {
                let ended = entry.peer.rekey_local(self.local.as_ref());
                self.indices.free(ended);
            }
            // What waited for a key of ours may go now.
            if first {
                self.flush(id, now, out);
            }
            self.touch(id);
        }
    }

    fn update_peer(&mut self, update: &PeerUpdate, now: Now, out: &mut impl Outbox) {
        let key = &update.public_key;
        let found = self.peers.find(key);
        if update.remove {
            if let Some(id) = found {
                self.remove(id);
            }
            return;
        }
        //@ C-HS-11
        if self.local.as_ref().is_some_and(|l| l.public == *key) {
            return;
        }
        let id = match found {
            Some(id) => id,
            None if update.update_only => return,
            None => match self.add(*key) {
                Some(id) => id,
                None => return,
            },
        };
        let Some(entry) = self.peers.get_mut(id) else { return };
        let peer = &mut entry.peer;
        if let Some(psk) = &update.preshared_key {
            //@ C-HS-8
            peer.psk.clone_from(psk);
        }
        if let Some(endpoint) = update.endpoint {
            peer.endpoint = Some(Endpoint::new(endpoint));
        }
        if let Some(seconds) = update.persistent_keepalive {
            let turned_on = peer.timers.set_interval(seconds, now.mono);
            if !self.up {
                peer.timers.stop();
            } else if turned_on {
                peer.timers.persist_now(now.mono);
            }
        }
        if update.replace_allowed_ips {
            //@ C-AIP-3
            self.routes.remove_peer(id);
            self.changes.route(RouteEdit::RemovePeer(id));
        }
        for ip in &update.allowed_ips {
            if ip.remove {
                //@ C-AIP-2
                self.routes.remove(ip.net, id);
                self.changes.route(RouteEdit::Remove(ip.net, id));
            } else {
                //@ C-AIP-1
                self.routes.insert(ip.net, id);
                self.changes.route(RouteEdit::Insert(ip.net, id));
            }
        }
        //@ C-AIP-5
        self.recent = [None; 2];
        if self.up {
            self.flush(id, now, out);
        }
        self.schedule(id);
    }

    fn add(&mut self, key: PublicKey) -> Option<PeerId> {
        let mut jitter = [0; 8];
        self.entropy.fill(&mut jitter);
        self.peers.insert(Peer::new(key, self.local.as_ref(), u64::from_ne_bytes(jitter)))
    }

    fn remove(&mut self, id: PeerId) {
        self.touch(id);
        self.drop_staged(id);
        self.routes.remove_peer(id);
        self.changes.route(RouteEdit::RemovePeer(id));
        self.recent = [None; 2];
        let Some(mut entry) = self.peers.remove(id) else { return };
        let (keypairs, handshake) = entry.peer.wipe();
        self.free(keypairs);
        self.indices.free(handshake);
    }

    /// Follows the interface. Down: timers stop, keys are wiped, waiting packets dropped. Up: persistent
    /// keepalives go out (C-TMR-12). A new device is down.
    pub fn set_up(&mut self, up: bool, now: Now, out: &mut impl Outbox) {
        //@ C-TMR-12
        if self.up == up {
            return;
        }
        self.up = up;
        if !up {
            self.waiting.clear();
        }
        for id in self.peers.ids() {
            let Some(entry) = self.peers.get_mut(id) else { continue };
            if up {
                //@ C-TMR-6
                entry.peer.timers.persist_now(now.mono);
                self.schedule(id);
            } else {
                entry.peer.timers.stop();
                let (keypairs, handshake) = entry.peer.wipe();
                self.free(keypairs);
                self.indices.free(handshake);
                self.drop_staged(id);
            }
            self.touch(id);
        }
        // A bounded number of keepalives goes here, the rest from `handle_timeout`.
        self.handle_timeout(now, out);
    }

    /// Is the device up?
    pub const fn is_up(&self) -> bool {
        self.up
    }

    /// The TUN device's MTU in bytes, 0 = unknown; bounds padding (C-OUT-2).
    pub const fn set_mtu(&mut self, mtu: u16) {
        self.config.mtu = mtu;
    }

    /// What `wg show` prints. `listen_port` and `fwmark` are the sockets' business and stay 0 here.
    pub fn snapshot(&self) -> DeviceSnapshot {
        let peers = self.peers.ids_by_age().into_iter().filter_map(|id| {
            let peer = &self.peers.get(id)?.peer;
            Some(PeerSnapshot {
                public_key: peer.public,
                preshared_key: peer.psk.clone(),
                endpoint: peer.endpoint.map(|e| e.remote),
                last_handshake: peer.stats.last_handshake,
                tx_bytes: peer.stats.tx_bytes,
                rx_bytes: peer.stats.rx_bytes,
                persistent_keepalive: peer.timers.interval(),
                allowed_ips: self.routes.list(id).collect::<Vec<IpNet>>(),
            })
        });
        DeviceSnapshot {
            private_key: self.local.as_ref().map(|l| l.private.clone()),
            peers: peers.collect(),
            ..DeviceSnapshot::default()
        }
    }

    /// The id of a peer, for events.
    pub fn peer(&self, key: &PublicKey) -> Option<PeerId> {
        self.peers.find(key)
    }

    /// The public key of a peer, while it exists.
    pub fn public_key(&self, id: PeerId) -> Option<PublicKey> {
        self.peers.get(id).map(|e| e.peer.public)
    }
}
