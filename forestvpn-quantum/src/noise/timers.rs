//! What a [`Tunn`] does by itself as time passes.

use super::errors::WireGuardError;
use super::tunn::Tunn;
use super::{TunnResult, When, to_network};
use crate::time::{Instant, Now};
use crate::timers::Due;
use crate::wire::{DATA_OVERHEAD, INITIATION};

impl Tunn {
    /// Call this about four times a second, or when [`next_timer_update`](Self::next_timer_update) says: it
    /// makes initiations and keepalives that are due, one per call.
    /// [`WireGuardError::ConnectionExpired`] is answered from when we gave up until the next handshake.
    pub fn update_timers<'a>(&mut self, dst: &'a mut [u8]) -> TunnResult<'a> {
        let now = self.watch.read();
        let len = self.tick(dst, now);
        to_network(dst, len)
    }

    /// [`update_timers`](Self::update_timers), told the time.
    pub fn update_timers_at<'a>(&mut self, dst: &'a mut [u8], now: Now) -> TunnResult<'a> {
        let len = self.tick(dst, now.into());
        to_network(dst, len)
    }

    /// When [`update_timers_at`](Self::update_timers_at) has something to do: never earlier than the last
    /// time this tunnel was told, and every call at that time gets something done. `None`: not before the
    /// next packet.
    pub fn next_timer_update(&self) -> Option<Instant> {
        //@ C-TMR-13
        if self.ready(self.latest) {
            return Some(self.latest);
        }
        let next = self.peer.timers.next();
        (next != Instant::MAX).then(|| next.max(self.latest))
    }

    /// Is there something to send whatever the timers say?
    fn ready(&self, now: Instant) -> bool {
        self.rekey || (!self.peer.staging.is_empty() && self.peer.seal_key(now).is_some())
    }

    /// Bytes of `dst` that the next thing to send may take.
    pub(super) fn need(&self, now: Instant) -> usize {
        let waiting = self.peer.staging.front().filter(|_| self.peer.seal_key(now).is_some());
        waiting.map_or(0, |p| p.len().saturating_add(DATA_OVERHEAD)).max(INITIATION)
    }

    fn tick(&mut self, dst: &mut [u8], now: When) -> Result<usize, WireGuardError> {
        self.latest = now.mono;
        if self.own_limiter {
            self.limiter.turn(now);
        }
        let due = self.peer.timers.next() <= now.mono || self.ready(now.mono);
        if due && dst.len() < self.need(now.mono) {
            return Err(WireGuardError::DestinationBufferTooSmall);
        }
        while let Some(due) = self.peer.timers.expire(now.mono) {
            let len = match due {
                //@ C-TMR-1
                Due::Retransmit if self.peer.timers.may_initiate(now.mono, false) => {
                    self.initiate(dst, now)?
                }
                Due::Retransmit => 0,
                //@ C-TMR-4
                Due::NewHandshake => self.begin(dst, now)?,
                //@ C-TMR-5
                //@ C-TMR-6
                Due::Keepalive | Due::PersistentKeepalive => self.keepalive(dst, now)?,
                Due::Flush => self.pending(dst, now)?,
                Due::GiveUp => {
                    self.peer.staging.clear();
                    self.expire()
                }
                //@ C-SES-7
                // What waits stays, as in the kernel: a handshake for it is under way.
                Due::Wipe => {
                    self.peer.wipe();
                    self.expire()
                }
            };
            if len > 0 {
                return Ok(len);
            }
        }
        match self.pending(dst, now)? {
            0 if self.expired => Err(WireGuardError::ConnectionExpired),
            len => Ok(len),
        }
    }

    /// What waits instead of an empty packet, if anything does; a handshake when there is no session.
    fn keepalive(&mut self, dst: &mut [u8], now: When) -> Result<usize, WireGuardError> {
        if self.peer.staging.is_empty() {
            self.peer.staging.push(&[], 0);
        }
        let sent = match self.seal(None, dst, now)? {
            0 => self.begin(dst, now),
            len => Ok(len),
        };
        self.peer.timers.kept_alive(now.mono);
        sent
    }

    fn expire(&mut self) -> usize {
        self.rekey = false;
        self.expired = true;
        0
    }
}
