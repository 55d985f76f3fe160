//! The cold door: deadlines, without ever scanning all peers.

use core::cmp::Reverse;

use super::{Device, PeerId};
use crate::batch::Outbox;
use crate::event::{Discard, Event};
use crate::time::{Instant, Now};
use crate::timers::Due;

/// Queued handshake messages worked off per call: their Diffie-Hellman must not starve data.
const HANDSHAKES_PER_CALL: usize = 4;
/// Peers whose deadlines are served per call.
const PEERS_PER_CALL: usize = 64;

impl Device {
    /// When [`Device::handle_timeout`] is to be called next; the past or present means now. `None`: nothing
    /// is pending until a packet comes or the configuration changes.
    pub fn poll_timeout(&self) -> Option<Instant> {
        //@ C-TMR-13
        let handshake = self.waiting.front().map(|w| w.since);
        let deadline = self.deadlines.peek().map(|Reverse((at, _))| *at);
        [handshake, deadline, self.limiter.deadline()].into_iter().flatten().min()
    }

    /// Works off queued handshakes and passed deadlines, a bounded number per call: call again while
    /// [`Device::poll_timeout`] is due. Every call makes progress.
    pub fn handle_timeout(&mut self, now: Now, out: &mut impl Outbox) {
        for _ in 0..HANDSHAKES_PER_CALL {
            if !self.work(now, out) {
                break;
            }
        }
        self.limiter.collect(now.mono);
        for _ in 0..PEERS_PER_CALL {
            let Some(Reverse((at, id))) = self.deadlines.peek().copied() else { break };
            if at > now.mono {
                break;
            }
            self.deadlines.pop();
            // An entry that no longer stands for its peer is what lazy repair leaves behind.
            if self.peers.get_mut(id).is_some_and(|e| e.queued == at) {
                self.expire(id, now, out);
            }
        }
    }

    fn expire(&mut self, id: PeerId, now: Now, out: &mut impl Outbox) {
        while let Some(due) = self.peers.get_mut(id).and_then(|e| e.peer.timers.expire(now.mono)) {
            match due {
                Due::Retransmit => {
                    self.forget_source(id);
                    self.initiate(id, false, now, out);
                }
                Due::NewHandshake => {
                    self.forget_source(id);
                    self.initiate(id, true, now, out);
                }
                Due::GiveUp => {
                    self.drop_staged(id);
                    self.event(Event::HandshakeFailed(id));
                }
                Due::Keepalive | Due::PersistentKeepalive => self.keepalive(id, now, out),
                Due::Flush => {
                    self.flush(id, now, out);
                    break;
                }
                Due::Wipe => {
                    //@ C-SES-7
                    let Some(entry) = self.peers.get_mut(id) else { return };
                    let had = entry.peer.has_session();
                    let (keypairs, handshake) = entry.peer.wipe();
                    self.free(keypairs);
                    self.indices.free(handshake);
                    // What waits stays, as in the kernel: a handshake for it is on its way.
                    if had {
                        self.event(Event::SessionExpired(id));
                    }
                }
            }
        }
        if let Some(entry) = self.peers.get_mut(id) {
            entry.queued = Instant::MAX;
        }
        self.schedule(id);
    }

    /// Makes the heap know the peer's earliest deadline. Later ones are found when the earlier entry fires.
    pub(super) fn schedule(&mut self, id: PeerId) {
        self.touch(id);
        let Some(entry) = self.peers.get_mut(id) else { return };
        let next = entry.peer.timers.next();
        if next < entry.queued {
            entry.queued = next;
            self.deadlines.push(Reverse((next, id)));
            // Peers that come and go leave entries behind; sweep when they are the most.
            if self.deadlines.len() > 64 + 8 * self.peers.len() {
                let peers = &self.peers;
                self.deadlines.retain(|Reverse((at, id))| peers.get(*id).is_some_and(|e| e.queued == *at));
            }
        }
    }

    pub(super) fn drop_staged(&mut self, id: PeerId) {
        let Some(entry) = self.peers.get_mut(id) else { return };
        let staging = &mut entry.peer.staging;
        self.staged_bytes = self.staged_bytes.saturating_sub(staging.bytes());
        let dropped = staging.clear();
        self.discard(Discard::GivenUp, dropped);
    }

    /// The local address that was used may be what is wrong (C-OUT-7).
    pub(super) fn forget_source(&mut self, id: PeerId) {
        //@ C-OUT-7
        if let Some(endpoint) = self.peers.get_mut(id).and_then(|e| e.peer.endpoint.as_mut()) {
            endpoint.local = None;
        }
        self.touch(id);
    }
}
