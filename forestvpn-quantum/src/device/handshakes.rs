//! The cold door: handshake messages in and out, load and cookies.

use core::time::Duration;

use super::{Device, PeerId};
use crate::batch::{Endpoint, Envelope, Outbox};
use crate::event::{Discard, Event};
use crate::handshake;
use crate::index::Kind;
use crate::peer::Freed;
use crate::time::{Instant, Now};
use crate::wire::{self, INITIATION, Message, RESPONSE};

/// How long "under load" lasts after it was last true (C-LOAD-1).
const LOAD_STICKS: Duration = Duration::from_secs(1);

/// A handshake message whose mac1 was right, waiting for its Diffie-Hellman work.
pub(super) struct Waiting {
    pub(super) since: Instant,
    from: Endpoint,
    message: Handshake,
}

enum Handshake {
    Initiation(Box<[u8; INITIATION]>),
    Response(Box<[u8; RESPONSE]>),
}

impl Device {
    /// Cheap checks on a message that is not data; what passes waits for [`Device::handle_timeout`].
    pub(super) fn message(
        &mut self,
        now: Now,
        message: &Message<'_>,
        from: Endpoint,
        out: &mut impl Outbox,
    ) -> Result<(), Discard> {
        let bytes: &[u8] = match message {
            Message::CookieReply(reply) => {
                let id = self.indices.any(wire::u32_at(&reply[..], 4)).ok_or(Discard::UnknownIndex)?;
                let entry = self.peers.get_mut(id).ok_or(Discard::UnknownIndex)?;
                return entry.peer.accept_cookie(reply, now.mono);
            }
            Message::Initiation(m) => *m,
            Message::Response(m) => *m,
            Message::Data(_) => return Err(Discard::Malformed),
        };
        //@ C-HS-2
        let checker = &mut self.local.as_mut().ok_or(Discard::NoKey)?.checker;
        if !checker.mac1_ok(bytes) {
            return Err(Discard::BadMac1);
        }
        //@ C-LOAD-1
        let threshold = (self.config.handshake_queue / 8).max(1);
        if self.waiting.len() >= threshold {
            self.loaded_until = now.mono.after(LOAD_STICKS);
        }
        if now.mono < self.loaded_until {
            //@ C-LOAD-2
            //@ C-CK-4
            let cookie = checker.cookie(from.remote, now.mono, &mut *self.entropy);
            if !checker.mac2_ok(bytes, &cookie) {
                //@ C-LOAD-4
                let reply = checker.reply(bytes, &cookie, &mut *self.entropy);
                return Err(match send(out, Envelope::new(from), &reply) {
                    true => Discard::CookieSent,
                    false => Discard::NoRoom,
                });
            }
            if !self.limiter.allow(from.remote.ip(), now.mono) {
                return Err(Discard::UnderLoad);
            }
        }
        //@ C-LOAD-3
        if self.waiting.len() >= self.config.handshake_queue {
            return Err(Discard::QueueFull);
        }
        let message = match message {
            Message::Initiation(m) => Handshake::Initiation(Box::new(**m)),
            Message::Response(m) => Handshake::Response(Box::new(**m)),
            Message::CookieReply(_) | Message::Data(_) => return Err(Discard::Malformed),
        };
        self.waiting.push_back(Waiting { since: now.mono, from, message });
        Ok(())
    }

    /// Does the work of one queued handshake message. Gives whether there was one.
    pub(super) fn work(&mut self, now: Now, out: &mut impl Outbox) -> bool {
        let Some(Waiting { from, message, .. }) = self.waiting.pop_front() else { return false };
        if self.waiting.is_empty() {
            self.waiting.shrink_to(64);
        }
        let result = match message {
            Handshake::Initiation(m) => self.initiation(now, &m, from, out),
            Handshake::Response(m) => self.response(now, &m, from, out),
        };
        if let Err(why) = result {
            self.discard(why, 1);
        }
        true
    }

    fn initiation(
        &mut self,
        now: Now,
        message: &[u8; INITIATION],
        from: Endpoint,
        out: &mut impl Outbox,
    ) -> Result<(), Discard> {
        let local = self.local.as_ref().ok_or(Discard::NoKey)?;
        let introduced = handshake::introduce(&local.private, &local.public, message)?;
        let id = self.peers.find(&introduced.remote).ok_or(Discard::UnknownPeer)?;
        let peer = &mut self.peers.get_mut(id).ok_or(Discard::UnknownPeer)?.peer;
        let (introduced, ended) = peer.accept_initiation(introduced, now.mono)?;
        self.indices.free(ended);
        let index = self.indices.allocate(id, Kind::Keypair, &mut *self.entropy);
        let Some((response, freed)) = peer.respond(introduced, index, now.mono, &mut *self.entropy) else {
            self.indices.free(Some(index));
            return Err(Discard::NoKey);
        };
        peer.stats.rx_bytes += INITIATION as u64;
        let roamed = peer.heard(Some(from), now.mono);
        if send(out, handshake_to(from, id), &response) {
            peer.stats.tx_bytes += RESPONSE as u64;
        } else {
            self.discard(Discard::NoRoom, 1);
        }
        self.free(freed);
        if roamed {
            self.event(Event::EndpointChanged(id));
        }
        self.schedule(id);
        Ok(())
    }

    fn response(
        &mut self,
        now: Now,
        message: &[u8; RESPONSE],
        from: Endpoint,
        out: &mut impl Outbox,
    ) -> Result<(), Discard> {
        let index = wire::u32_at(message, 8);
        let id = self.indices.handshake(index).ok_or(Discard::UnknownIndex)?;
        let local = self.local.as_ref().ok_or(Discard::NoKey)?;
        let peer = &mut self.peers.get_mut(id).ok_or(Discard::UnknownIndex)?.peer;
        let freed = peer.accept_response(local, message, now)?;
        self.indices.promote(index);
        peer.stats.rx_bytes += RESPONSE as u64;
        let roamed = peer.heard(Some(from), now.mono);
        self.free(freed);
        if roamed {
            self.event(Event::EndpointChanged(id));
        }
        self.event(Event::SessionEstablished(id));
        //@ C-SES-4
        self.keepalive(id, now, out);
        Ok(())
    }

    /// Sends an initiation to the peer unless one went less than 5 s ago (C-TMR-3).
    pub(super) fn initiate(&mut self, id: PeerId, fresh: bool, now: Now, out: &mut impl Outbox) {
        let Some(entry) = self.peers.get_mut(id) else { return };
        let peer = &mut entry.peer;
        let (Some(endpoint), true) = (peer.endpoint, self.up) else { return };
        if !peer.timers.may_initiate(now.mono, fresh) {
            self.schedule(id);
            return;
        }
        let Some(local) = &self.local else { return };
        self.indices.free(peer.clear_handshake());
        let index = self.indices.allocate(id, Kind::Handshake, &mut *self.entropy);
        match peer.initiate(local, index, now, &mut *self.entropy) {
            Some(message) => {
                if send(out, handshake_to(endpoint, id), &message) {
                    peer.stats.tx_bytes += INITIATION as u64;
                } else {
                    // The retransmit timer is armed: the loss costs 5 s, not the handshake.
                    self.discard(Discard::NoRoom, 1);
                }
            }
            None => {
                self.indices.free(Some(index));
                self.discard(Discard::NoKey, 1);
            }
        }
        self.schedule(id);
    }

    pub(super) fn free(&mut self, indices: Freed) {
        indices.into_iter().for_each(|index| self.indices.free(index));
    }
}

/// DSCP AF41 on initiations and responses, as the kernel has it.
const HANDSHAKE_TOS: u8 = 0x88;

const fn handshake_to(to: Endpoint, id: PeerId) -> Envelope {
    //@ C-LOAD-5
    Envelope { peer: Some(id), tos: HANDSHAKE_TOS, ..Envelope::new(to) }
}

/// One handshake datagram; gives whether there was room.
fn send(out: &mut impl Outbox, envelope: Envelope, message: &[u8]) -> bool {
    match out.reserve(&envelope, message.len(), 1) {
        Some(slot) => {
            wire::put(slot, 0, message);
            out.commit(message.len());
            true
        }
        None => false,
    }
}
