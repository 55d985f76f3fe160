//! [`Tunn`]: one peer's tunnel, one datagram in and one out per call.

use core::net::IpAddr;
use core::time::Duration;
use std::sync::Arc;

use super::errors::WireGuardError;
use super::inward::Arrivals;
use super::packet::Packet;
use super::rate_limiter::RateLimiter;
use super::{TunnResult, Watch, When, to_network};
use crate::ip;
use crate::key::{PresharedKey, PrivateKey, PublicKey};
use crate::peer::{Local, Peer};
use crate::session;
use crate::staging;
use crate::time::{Entropy, Instant, Now, OsEntropy};
use crate::wire::{self, DATA_OVERHEAD, INITIATION};
use crate::x25519;

/// Handshake messages per second that a tunnel with a limiter of its own takes unproved.
const OWN_LIMIT: u64 = 10;
/// 1500 less the most that IPv6, UDP and we put round a packet.
const USUAL_MTU: u16 = 1420;

/// A tunnel to one peer. Every method may be called at any time; nothing blocks, nothing panics.
///
/// `dst` needs room for 148 bytes, for the packet handed in and 32 more, and for the datagram handed in. When
/// it is too short the call answers [`WireGuardError::DestinationBufferTooSmall`] and nothing has happened.
pub struct Tunn {
    pub(super) local: Local,
    pub(super) peer: Peer,
    /// `index << 8`; the low byte counts handshakes.
    index: u32,
    count: u8,
    pub(super) limiter: Arc<RateLimiter>,
    pub(super) own_limiter: bool,
    mtu: u16,
    /// An initiation that is due and did not fit into the answer of the call that found it out.
    pub(super) rekey: bool,
    /// Nobody answers, or the keys are wiped; ends with the next handshake.
    pub(super) expired: bool,
    pub(super) watch: Watch,
    /// The last time we were told.
    pub(super) latest: Instant,
    /// When the outstanding initiation went out.
    pub(super) asked: Option<Instant>,
    pub(super) rtt_ms: Option<u32>,
    /// Bytes of inner packets.
    tx_bytes: usize,
    pub(super) rx_bytes: usize,
    pub(super) arrivals: Arrivals,
}

impl core::fmt::Debug for Tunn {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Tunn").field("peer", &self.peer.public).finish_non_exhaustive()
    }
}

impl Tunn {
    /// A tunnel between our key and the peer's. `index` is below 2^24 and tells this caller's tunnels apart:
    /// the peer's messages carry `index << 8 | n`. Without a `rate_limiter` the tunnel makes its own.
    pub fn new(
        static_private: x25519::StaticSecret,
        peer_static_public: x25519::PublicKey,
        preshared_key: Option<[u8; 32]>,
        persistent_keepalive: Option<u16>,
        index: u32,
        rate_limiter: Option<Arc<RateLimiter>>,
    ) -> Self {
        let key = peer_static_public;
        Self::new_at(
            static_private,
            key,
            preshared_key,
            persistent_keepalive,
            index,
            rate_limiter,
            When::read().both(),
        )
    }

    /// [`new`](Self::new), told the time.
    pub fn new_at(
        static_private: x25519::StaticSecret,
        peer_static_public: x25519::PublicKey,
        preshared_key: Option<[u8; 32]>,
        persistent_keepalive: Option<u16>,
        index: u32,
        rate_limiter: Option<Arc<RateLimiter>>,
        now: Now,
    ) -> Self {
        let local = Local::new(PrivateKey::new(static_private.to_bytes()), false);
        let mut jitter = [0; 8];
        OsEntropy.fill(&mut jitter);
        let public = PublicKey(peer_static_public.to_bytes());
        let mut peer = Peer::new(public, Some(&local), u64::from_ne_bytes(jitter));
        peer.psk = preshared_key.map(PresharedKey::new);
        peer.timers.set_interval(persistent_keepalive.unwrap_or(0), now.mono);
        let own_limiter = rate_limiter.is_none();
        Self {
            limiter: rate_limiter.unwrap_or_else(|| own_limiter_for(&local.public)),
            own_limiter,
            mtu: USUAL_MTU,
            local,
            peer,
            index: index << 8,
            count: 0,
            rekey: false,
            expired: false,
            watch: Watch::default(),
            latest: now.mono,
            asked: None,
            rtt_ms: None,
            tx_bytes: 0,
            rx_bytes: 0,
            arrivals: Arrivals::default(),
        }
    }

    /// Changes our private key and ends all sessions. `static_public` is not used: it follows from the
    /// private key.
    pub fn set_static_private(
        &mut self,
        static_private: x25519::StaticSecret,
        static_public: x25519::PublicKey,
        rate_limiter: Option<Arc<RateLimiter>>,
    ) {
        let _ = static_public;
        self.local = Local::new(PrivateKey::new(static_private.to_bytes()), false);
        self.own_limiter = rate_limiter.is_none();
        self.limiter = rate_limiter.unwrap_or_else(|| own_limiter_for(&self.local.public));
        self.peer.rekey_local(Some(&self.local));
        self.peer.wipe();
        self.rekey = false;
    }

    /// Packets are padded, but not beyond this many bytes: the MTU of the interface that they come from, 1420
    /// if you do not say. Upstream has no such method because it does not pad.
    pub fn set_mtu(&mut self, mtu: u16) {
        self.mtu = mtu;
    }

    /// What kind of message is this, and for which index? Authenticates nothing.
    ///
    /// # Errors
    /// [`WireGuardError::InvalidPacket`] when type, reserved bytes and length do not fit together.
    pub fn parse_incoming_packet(src: &[u8]) -> Result<Packet<'_>, WireGuardError> {
        Packet::parse(src)
    }

    /// The destination address of an IP packet.
    pub fn dst_address(packet: &[u8]) -> Option<IpAddr> {
        ip::destination(packet)
    }

    /// Did the peer stay silent until we gave up, or were all keys wiped? The next packet begins anew.
    pub fn is_expired(&self) -> bool {
        self.expired
    }

    /// Seconds between persistent keepalives; `None` when they are off.
    pub fn persistent_keepalive(&self) -> Option<u16> {
        Some(self.peer.timers.interval()).filter(|s| *s != 0)
    }

    /// Age of the session that is sent with.
    pub fn time_since_last_handshake(&self) -> Option<Duration> {
        self.peer.session_age(When::read().mono)
    }

    /// [`time_since_last_handshake`](Self::time_since_last_handshake), told the time.
    pub fn time_since_last_handshake_at(&self, now: Now) -> Option<Duration> {
        self.peer.session_age(now.mono)
    }

    /// Age of the session, bytes of inner packets sent and received, estimated loss of what the peer sent
    /// (0 to 1), and milliseconds between our last initiation and its response.
    pub fn stats(&self) -> (Option<Duration>, usize, usize, f32, Option<u32>) {
        self.stats_at(When::read().both())
    }

    /// [`stats`](Self::stats), told the time.
    pub fn stats_at(&self, now: Now) -> (Option<Duration>, usize, usize, f32, Option<u32>) {
        let age = self.time_since_last_handshake_at(now);
        (age, self.tx_bytes, self.rx_bytes, self.arrivals.loss(), self.rtt_ms)
    }

    // -- outward --------------------------------------------------------------------------------------

    /// Puts an IP packet into a datagram. An empty packet is a keepalive. Without a session the packet waits
    /// (the 128 newest do) and the answer is an initiation, or `Done` while one is under way.
    pub fn encapsulate<'a>(&mut self, src: &[u8], dst: &'a mut [u8]) -> TunnResult<'a> {
        let now = self.watch.glance();
        let len = self.outward(src, dst, now);
        to_network(dst, len)
    }

    /// [`encapsulate`](Self::encapsulate), told the time.
    pub fn encapsulate_at<'a>(&mut self, src: &[u8], dst: &'a mut [u8], now: Now) -> TunnResult<'a> {
        let len = self.outward(src, dst, now.into());
        to_network(dst, len)
    }

    /// Puts an IP packet into a datagram if there is a session. Otherwise nothing happens: nothing waits, no
    /// handshake begins, and the answer is [`WireGuardError::NoCurrentSession`].
    pub fn encapsulate_data_at<'a>(&mut self, src: &[u8], dst: &'a mut [u8], now: Now) -> TunnResult<'a> {
        self.latest = now.mono;
        let len = match self.seal(Some(src), dst, now.into()) {
            Ok(0) => Err(WireGuardError::NoCurrentSession),
            sealed => sealed,
        };
        to_network(dst, len)
    }

    fn outward(&mut self, src: &[u8], dst: &mut [u8], now: When) -> Result<usize, WireGuardError> {
        self.latest = now.mono;
        let waiting = !self.peer.staging.is_empty();
        if !waiting {
            let len = self.seal(Some(src), dst, now)?;
            if len > 0 {
                return Ok(len);
            }
        }
        if dst.len() < self.need(now.mono) {
            return Err(WireGuardError::DestinationBufferTooSmall);
        }
        self.peer.staging.push(src, staging::MAX_BYTES);
        // What waited longer goes first.
        match self.seal(None, dst, now)? {
            0 => self.begin(dst, now),
            len => Ok(len),
        }
    }

    /// Seals `packet`, or the oldest that waits, into `dst`. Gives 0 when there is no session for it.
    pub(super) fn seal(
        &mut self,
        packet: Option<&[u8]>,
        dst: &mut [u8],
        now: When,
    ) -> Result<usize, WireGuardError> {
        let peer = &mut self.peer;
        let Some(bytes) = packet.or_else(|| peer.staging.front()) else { return Ok(0) };
        let Some(key) = peer.seal_key(now.mono) else { return Ok(0) };
        // Upstream promises that 32 bytes more are enough, so padding takes only what room is left.
        let room = dst.len().checked_sub(DATA_OVERHEAD).filter(|room| *room >= bytes.len());
        let room = room.ok_or(WireGuardError::DestinationBufferTooSmall)?;
        //@ C-OUT-2
        let total = DATA_OVERHEAD + session::padded(bytes.len(), self.mtu.into()).min(room);
        let Some(datagram) = dst.get_mut(..total) else { return Ok(0) };
        let Some(counter) = key.reserve(1, now.mono) else { return Ok(0) };
        let len = bytes.len();
        session::lay(datagram, len, |to| to.copy_from_slice(bytes));
        key.seal(counter, datagram);
        if packet.is_none() {
            peer.staging.pop();
        }
        self.tx_bytes = self.tx_bytes.saturating_add(len);
        if peer.sent(now.mono, total, len > 0) {
            self.rekey |= peer.timers.may_initiate(now.mono, true);
        }
        Ok(total)
    }

    /// Begins a handshake, unless an initiation went less than 5 s ago.
    pub(super) fn begin(&mut self, dst: &mut [u8], now: When) -> Result<usize, WireGuardError> {
        if self.peer.timers.may_initiate(now.mono, true) { self.initiate(dst, now) } else { Ok(0) }
    }

    pub(super) fn initiate(&mut self, dst: &mut [u8], now: When) -> Result<usize, WireGuardError> {
        if dst.len() < INITIATION {
            return Err(WireGuardError::DestinationBufferTooSmall);
        }
        let now = self.watch.sharpen(now);
        let index = self.fresh_index();
        let Some(message) = self.peer.initiate(&self.local, index, now.both(), &mut OsEntropy) else {
            // No handshake with this key will ever be possible (C-PRIM-4): nothing to wait for.
            self.peer.staging.clear();
            return Err(WireGuardError::WrongKey);
        };
        wire::put(dst, 0, &message);
        self.rekey = false;
        self.expired = false;
        self.asked = Some(now.mono);
        Ok(INITIATION)
    }

    /// The next `index << 8 | n` that no handshake and no session goes by.
    pub(super) fn fresh_index(&mut self) -> u32 {
        loop {
            let index = self.index | u32::from(self.count);
            self.count = self.count.wrapping_add(1);
            // At most four are alive (C-IDX-4), so this ends.
            if !self.peer.uses(index) {
                return index;
            }
        }
    }

    /// Makes an initiation, also when one is under way and `force_resend` is set; otherwise `Done` then.
    pub fn format_handshake_initiation<'a>(
        &mut self,
        dst: &'a mut [u8],
        force_resend: bool,
    ) -> TunnResult<'a> {
        let now = self.watch.read();
        self.format_handshake_initiation_at(dst, force_resend, now.both())
    }

    /// [`format_handshake_initiation`](Self::format_handshake_initiation), told the time.
    pub fn format_handshake_initiation_at<'a>(
        &mut self,
        dst: &'a mut [u8],
        force_resend: bool,
        now: Now,
    ) -> TunnResult<'a> {
        self.latest = now.mono;
        if self.peer.handshake_index().is_some() && !self.expired && !force_resend {
            return TunnResult::Done;
        }
        let len = self.initiate(dst, now.into());
        if len.is_ok() {
            // The caller asked, so the attempts count from here.
            self.peer.timers.may_initiate(now.mono, true);
        }
        to_network(dst, len)
    }
}

fn own_limiter_for(public: &PublicKey) -> Arc<RateLimiter> {
    Arc::new(RateLimiter::new(&x25519::PublicKey::from(public.0), OWN_LIMIT))
}
