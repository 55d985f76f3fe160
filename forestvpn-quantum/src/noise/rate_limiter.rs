//! mac1, cookies and load for handshake messages; shared by all [`Tunn`](super::Tunn)s of one private key.
#![expect(
    clippy::disallowed_types,
    reason = "upstream's type is shared by reference; data packets never meet it"
)]

use core::fmt;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use std::sync::{Mutex, PoisonError};

use super::errors::WireGuardError;
use super::packet::Packet;
use super::{TunnResult, When, to_network};
use crate::cookie::Checker;
use crate::key::PublicKey;
use crate::limiter::Limiter;
use crate::time::{Entropy, Instant, Now, OsEntropy};
use crate::wire::{self, COOKIE_REPLY};
use crate::x25519;

/// Handshake messages are counted anew after this long.
const PERIOD: Duration = Duration::from_secs(1);

/// Checks mac1 of every handshake message. When more than `limit` came within a second, asks senders to prove
/// their address by a cookie, and then allows each 20 handshakes per second.
pub struct RateLimiter {
    limit: u64,
    state: Mutex<State>,
}

struct State {
    checker: Checker,
    buckets: Limiter,
    count: u64,
    since: Option<Instant>,
}

impl fmt::Debug for RateLimiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimiter").field("limit", &self.limit).finish_non_exhaustive()
    }
}

impl RateLimiter {
    /// For messages to `public_key`; `limit` handshake messages per second are let through unproved.
    pub fn new(public_key: &x25519::PublicKey, limit: u64) -> Self {
        let mut seed = [0; 16];
        OsEntropy.fill(&mut seed);
        let state = State {
            checker: Checker::new(&PublicKey(public_key.to_bytes())),
            buckets: Limiter::new(seed),
            count: 0,
            since: None,
        };
        Self { limit, state: Mutex::new(state) }
    }

    /// Counts anew when the last second is over, and forgets idle sources. Upstream has to be told so once
    /// per second; this limiter also does it by itself.
    pub fn reset_count(&self) {
        self.turn(When::read());
    }

    /// [`reset_count`](Self::reset_count), told the time.
    pub fn reset_count_at(&self, now: Now) {
        self.turn(now.into());
    }

    pub(super) fn turn(&self, now: When) {
        self.with(|state| state.turn(now.mono));
    }

    /// Parses a datagram; of a handshake message also checks mac1 and, under load, mac2. `dst` takes a cookie
    /// reply of 64 bytes.
    ///
    /// # Errors
    /// `TunnResult::WriteToNetwork` is a cookie reply to send; `TunnResult::Err` says why the datagram is to
    /// be dropped.
    pub fn verify_packet<'a, 'b>(
        &self,
        src_addr: Option<IpAddr>,
        src: &'a [u8],
        dst: &'b mut [u8],
    ) -> Result<Packet<'a>, TunnResult<'b>> {
        // Data packets need no time.
        match Packet::parse(src)? {
            packet @ (Packet::PacketData(_) | Packet::PacketCookieReply(_)) => Ok(packet),
            Packet::HandshakeInit(_) | Packet::HandshakeResponse(_) => {
                self.verify(src_addr, src, dst, When::read())
            }
        }
    }

    /// [`verify_packet`](Self::verify_packet), told the time.
    ///
    /// # Errors
    /// The same.
    pub fn verify_packet_at<'a, 'b>(
        &self,
        src_addr: Option<IpAddr>,
        src: &'a [u8],
        dst: &'b mut [u8],
        now: Now,
    ) -> Result<Packet<'a>, TunnResult<'b>> {
        self.verify(src_addr, src, dst, now.into())
    }

    fn verify<'a, 'b>(
        &self,
        src_addr: Option<IpAddr>,
        src: &'a [u8],
        dst: &'b mut [u8],
        now: When,
    ) -> Result<Packet<'a>, TunnResult<'b>> {
        let packet = Packet::parse(src)?;
        if let Packet::HandshakeInit(_) | Packet::HandshakeResponse(_) = packet {
            let reply = self.judge(src_addr, src, dst, now)?;
            if reply > 0 {
                return Err(to_network(dst, Ok(reply)));
            }
        }
        Ok(packet)
    }

    /// Judges a handshake message: 0 lets it through, else that many bytes of `dst` are a cookie reply.
    pub(super) fn judge(
        &self,
        source: Option<IpAddr>,
        message: &[u8],
        dst: &mut [u8],
        now: When,
    ) -> Result<usize, WireGuardError> {
        let reply = self.with(|state| state.judge(self.limit, source, message, dst.len(), now))?;
        Ok(reply.map_or(0, |reply| {
            wire::put(dst, 0, &reply);
            COOKIE_REPLY
        }))
    }

    fn with<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        // A panic elsewhere while holding the lock cannot leave the state half changed.
        f(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl State {
    fn turn(&mut self, now: Instant) {
        if self.since.is_none_or(|since| now.since(since) >= PERIOD) {
            self.since = Some(now);
            self.count = 0;
        }
        self.buckets.collect(now);
    }

    /// `Some` is a cookie reply instead of service.
    fn judge(
        &mut self,
        limit: u64,
        source: Option<IpAddr>,
        message: &[u8],
        room: usize,
        now: When,
    ) -> Result<Option<[u8; COOKIE_REPLY]>, WireGuardError> {
        if !self.checker.mac1_ok(message) {
            return Err(WireGuardError::InvalidMac);
        }
        self.turn(now.mono);
        self.count = self.count.saturating_add(1);
        if self.count <= limit {
            return Ok(None);
        }
        let source = source.ok_or(WireGuardError::UnderLoad)?;
        // Upstream's signature has no port, so the cookie cannot be bound to it (C-CK-1).
        let cookie = self.checker.cookie(SocketAddr::new(source, 0), now.mono, &mut OsEntropy);
        if self.checker.mac2_ok(message, &cookie) {
            return match self.buckets.allow(source, now.mono) {
                true => Ok(None),
                false => Err(WireGuardError::UnderLoad),
            };
        }
        if room < COOKIE_REPLY {
            return Err(WireGuardError::DestinationBufferTooSmall);
        }
        Ok(Some(self.checker.reply(message, &cookie, &mut OsEntropy)))
    }
}
