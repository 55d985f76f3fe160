//! [`Tunn`]: one peer's tunnel, one datagram in and one out per call.

use core::net::IpAddr;
use core::time::Duration;
use std::sync::Arc;

use super::errors::WireGuardError;
use super::packet::{HandshakeInit, HandshakeResponse, Packet, PacketCookieReply, PacketData};
use super::rate_limiter::RateLimiter;
use super::{TunnResult, clock, to_network};
use crate::handshake;
use crate::ip;
use crate::key::{PresharedKey, PrivateKey, PublicKey};
use crate::peer::{Local, Peer};
use crate::session;
use crate::staging;
use crate::time::{Entropy, Instant, Now, OsEntropy};
use crate::timers::REJECT_AFTER_MESSAGES;
use crate::wire::{self, COOKIE_REPLY, DATA_OVERHEAD, DataHeader, INITIATION, RESPONSE};
use crate::x25519;

/// Handshake messages per second that a tunnel with a limiter of its own takes unproved.
const OWN_LIMIT: u64 = 10;

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
    /// An initiation that is due and did not fit into the answer of the call that found it out.
    pub(super) rekey: bool,
    /// Nobody answers, or the keys are wiped; ends with the next handshake.
    pub(super) expired: bool,
    /// The last time we were told.
    pub(super) latest: Instant,
    /// When the outstanding initiation went out.
    asked: Option<Instant>,
    rtt_ms: Option<u32>,
    /// Bytes of inner packets.
    tx_bytes: usize,
    rx_bytes: usize,
    arrivals: [Arrivals; 2],
}

/// What came in on one session, to estimate loss from.
#[derive(Clone, Copy, Default)]
struct Arrivals {
    index: u32,
    newest: u64,
    count: u64,
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
        Self::new_at(static_private, key, preshared_key, persistent_keepalive, index, rate_limiter, clock())
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
        let local = Local::new(PrivateKey::new(static_private.to_bytes()));
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
            local,
            peer,
            index: index << 8,
            count: 0,
            rekey: false,
            expired: false,
            latest: now.mono,
            asked: None,
            rtt_ms: None,
            tx_bytes: 0,
            rx_bytes: 0,
            arrivals: Default::default(),
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
        // Timestamps go on growing, whatever the key.
        let timestamps = core::mem::take(&mut self.local.timestamps);
        self.local = Local::new(PrivateKey::new(static_private.to_bytes()));
        self.local.timestamps = timestamps;
        self.own_limiter = rate_limiter.is_none();
        self.limiter = rate_limiter.unwrap_or_else(|| own_limiter_for(&self.local.public));
        self.peer.rekey_local(Some(&self.local));
        self.peer.wipe();
        self.rekey = false;
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
        self.time_since_last_handshake_at(clock())
    }

    /// [`time_since_last_handshake`](Self::time_since_last_handshake), told the time.
    pub fn time_since_last_handshake_at(&self, now: Now) -> Option<Duration> {
        self.peer.session_age(now.mono)
    }

    /// Age of the session, bytes of inner packets sent and received, estimated loss of what the peer sent
    /// (0 to 1), and milliseconds between our last initiation and its response.
    pub fn stats(&self) -> (Option<Duration>, usize, usize, f32, Option<u32>) {
        self.stats_at(clock())
    }

    /// [`stats`](Self::stats), told the time.
    pub fn stats_at(&self, now: Now) -> (Option<Duration>, usize, usize, f32, Option<u32>) {
        let age = self.time_since_last_handshake_at(now);
        (age, self.tx_bytes, self.rx_bytes, self.loss(), self.rtt_ms)
    }

    // -- outward --------------------------------------------------------------------------------------

    /// Puts an IP packet into a datagram. An empty packet is a keepalive. Without a session the packet waits
    /// (the 128 newest do) and the answer is an initiation, or `Done` while one is under way.
    pub fn encapsulate<'a>(&mut self, src: &[u8], dst: &'a mut [u8]) -> TunnResult<'a> {
        self.encapsulate_at(src, dst, clock())
    }

    /// [`encapsulate`](Self::encapsulate), told the time.
    pub fn encapsulate_at<'a>(&mut self, src: &[u8], dst: &'a mut [u8], now: Now) -> TunnResult<'a> {
        let len = self.outward(src, dst, now);
        to_network(dst, len)
    }

    /// Puts an IP packet into a datagram if there is a session. Otherwise nothing happens: nothing waits, no
    /// handshake begins, and the answer is [`WireGuardError::NoCurrentSession`].
    pub fn encapsulate_data_at<'a>(&mut self, src: &[u8], dst: &'a mut [u8], now: Now) -> TunnResult<'a> {
        self.latest = now.mono;
        let len = match self.seal(Some(src), dst, now) {
            Ok(0) => Err(WireGuardError::NoCurrentSession),
            sealed => sealed,
        };
        to_network(dst, len)
    }

    fn outward(&mut self, src: &[u8], dst: &mut [u8], now: Now) -> Result<usize, WireGuardError> {
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
        now: Now,
    ) -> Result<usize, WireGuardError> {
        let peer = &mut self.peer;
        let Some(bytes) = packet.or_else(|| peer.staging.front()) else { return Ok(0) };
        let Some(key) = peer.seal_key(now.mono) else { return Ok(0) };
        // Upstream promises that 32 bytes more are enough, so padding takes only what room is left.
        let room = dst.len().checked_sub(DATA_OVERHEAD).filter(|room| *room >= bytes.len());
        let room = room.ok_or(WireGuardError::DestinationBufferTooSmall)?;
        //@ C-OUT-2
        let total = DATA_OVERHEAD + session::padded(bytes.len(), 0).min(room);
        let Some(datagram) = dst.get_mut(..total) else { return Ok(0) };
        let Some(counter) = key.reserve(1, now.mono) else { return Ok(0) };
        session::lay(bytes, datagram);
        key.seal(counter, datagram);
        let len = bytes.len();
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
    pub(super) fn begin(&mut self, dst: &mut [u8], now: Now) -> Result<usize, WireGuardError> {
        if self.peer.timers.may_initiate(now.mono, true) { self.initiate(dst, now) } else { Ok(0) }
    }

    pub(super) fn initiate(&mut self, dst: &mut [u8], now: Now) -> Result<usize, WireGuardError> {
        if dst.len() < INITIATION {
            return Err(WireGuardError::DestinationBufferTooSmall);
        }
        let index = self.fresh_index();
        let Some(message) = self.peer.initiate(&mut self.local, index, now, &mut OsEntropy) else {
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
    fn fresh_index(&mut self) -> u32 {
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
        self.format_handshake_initiation_at(dst, force_resend, clock())
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
        let len = self.initiate(dst, now);
        if len.is_ok() {
            // The caller asked, so the attempts count from here.
            self.peer.timers.may_initiate(now.mono, true);
        }
        to_network(dst, len)
    }

    // -- inward ---------------------------------------------------------------------------------------

    /// Takes a datagram. When the answer is `WriteToNetwork`, call again with an empty datagram until it is
    /// `Done`: packets that waited come out one by one.
    pub fn decapsulate<'a>(
        &mut self,
        src_addr: Option<IpAddr>,
        datagram: &[u8],
        dst: &'a mut [u8],
    ) -> TunnResult<'a> {
        self.decapsulate_at(src_addr, datagram, dst, clock())
    }

    /// [`decapsulate`](Self::decapsulate), told the time.
    pub fn decapsulate_at<'a>(
        &mut self,
        src_addr: Option<IpAddr>,
        datagram: &[u8],
        dst: &'a mut [u8],
        now: Now,
    ) -> TunnResult<'a> {
        self.latest = now.mono;
        if datagram.is_empty() {
            let len = self.pending(dst, now);
            return to_network(dst, len);
        }
        let len = match Packet::parse(datagram) {
            Ok(Packet::PacketData(p)) => return self.data(&p, dst, now),
            Ok(Packet::PacketCookieReply(p)) => self.cookie(&p, now),
            Ok(Packet::HandshakeInit(p)) => match self.judge(src_addr, datagram, RESPONSE, dst, now) {
                Ok(0) => self.initiation(&p, dst, now),
                refused => refused,
            },
            Ok(Packet::HandshakeResponse(p)) => {
                match self.judge(src_addr, datagram, COOKIE_REPLY, dst, now) {
                    Ok(0) => self.response(&p, dst, now),
                    refused => refused,
                }
            }
            Err(error) => Err(error),
        };
        to_network(dst, len)
    }

    /// Asks the limiter about a handshake message whose answer may take `room`; gives the length of a cookie
    /// reply in `dst`, or 0 to go on.
    fn judge(
        &self,
        source: Option<IpAddr>,
        message: &[u8],
        room: usize,
        dst: &mut [u8],
        now: Now,
    ) -> Result<usize, WireGuardError> {
        if dst.len() < room {
            return Err(WireGuardError::DestinationBufferTooSmall);
        }
        self.limiter.judge(source, message, dst, now)
    }

    /// What is ready to go: a packet that waited, or an initiation that is due.
    pub(super) fn pending(&mut self, dst: &mut [u8], now: Now) -> Result<usize, WireGuardError> {
        match self.seal(None, dst, now)? {
            0 if self.rekey => self.initiate(dst, now),
            len => Ok(len),
        }
    }

    fn initiation(
        &mut self,
        p: &HandshakeInit<'_>,
        dst: &mut [u8],
        now: Now,
    ) -> Result<usize, WireGuardError> {
        //@ C-HS-2
        let introduced = handshake::introduce(&self.local.private, &self.local.public, p.message)?;
        if introduced.remote != self.peer.public {
            return Err(WireGuardError::WrongKey);
        }
        let (introduced, _) = self.peer.accept_initiation(introduced, now.mono)?;
        let index = self.fresh_index();
        let response = self.peer.respond(introduced, index, now.mono, &mut OsEntropy);
        let (response, _) = response.ok_or(WireGuardError::WrongKey)?;
        self.peer.heard(None, now.mono);
        self.expired = false;
        self.asked = None;
        wire::put(dst, 0, &response);
        Ok(RESPONSE)
    }

    fn response(
        &mut self,
        p: &HandshakeResponse<'_>,
        dst: &mut [u8],
        now: Now,
    ) -> Result<usize, WireGuardError> {
        match self.peer.handshake_index() {
            None => return Err(WireGuardError::UnexpectedPacket),
            Some(index) if index != p.receiver_idx => return Err(WireGuardError::WrongIndex),
            Some(_) => {}
        }
        self.peer.accept_response(&self.local, p.message, now)?;
        self.peer.heard(None, now.mono);
        self.expired = false;
        self.rekey = false;
        if let Some(asked) = self.asked.take() {
            self.rtt_ms = u32::try_from(now.mono.since(asked).as_millis()).ok();
        }
        //@ C-SES-4
        // A packet that waits confirms the session as well as a keepalive, when there is room for it.
        match self.seal(None, dst, now) {
            Ok(len) if len > 0 => Ok(len),
            Ok(_) | Err(_) => self.seal(Some(&[]), dst, now),
        }
    }

    fn cookie(&mut self, p: &PacketCookieReply<'_>, now: Now) -> Result<usize, WireGuardError> {
        if !self.peer.uses(p.receiver_idx) {
            return Err(WireGuardError::WrongIndex);
        }
        self.peer.accept_cookie(p.message, now.mono)?;
        Ok(0)
    }

    fn data<'a>(&mut self, p: &PacketData<'_>, dst: &'a mut [u8], now: Now) -> TunnResult<'a> {
        let Some(body) = dst.get_mut(..p.body.len()) else {
            return TunnResult::Err(WireGuardError::DestinationBufferTooSmall);
        };
        body.copy_from_slice(p.body);
        let header = DataHeader { receiver: p.receiver_idx, counter: p.counter };
        let opened = match self.peer.open(header, body, None, now) {
            Ok(opened) => opened,
            Err(why) => return TunnResult::Err(self.explain(why.into(), header)),
        };
        self.note_arrival(header);
        self.expired &= !opened.confirmed;
        if opened.rekey {
            self.rekey |= self.peer.timers.may_initiate(now.mono, true);
        }
        if opened.len == 0 {
            let len = self.pending(dst, now);
            return to_network(dst, len);
        }
        let packet = dst.get_mut(..opened.len).unwrap_or_default();
        let (Some(len), Some(source)) = (ip::length(packet), ip::source(packet)) else {
            return TunnResult::Err(WireGuardError::InvalidPacket);
        };
        self.rx_bytes = self.rx_bytes.saturating_add(len);
        match (packet.get_mut(..len), source) {
            (Some(packet), IpAddr::V4(source)) => TunnResult::WriteToTunnelV4(packet, source),
            (Some(packet), IpAddr::V6(source)) => TunnResult::WriteToTunnelV6(packet, source),
            (None, _) => TunnResult::Err(WireGuardError::InvalidPacket),
        }
    }

    /// Upstream tells more reasons apart than the core counts.
    fn explain(&self, error: WireGuardError, header: DataHeader) -> WireGuardError {
        #[expect(clippy::wildcard_enum_match_arm, reason = "only three need a closer look")]
        match error {
            WireGuardError::WrongIndex if !self.peer.has_session() => WireGuardError::NoCurrentSession,
            WireGuardError::NoCurrentSession if header.counter >= REJECT_AFTER_MESSAGES => {
                WireGuardError::InvalidCounter
            }
            WireGuardError::DuplicateCounter if self.peer.fell_out(header) => WireGuardError::InvalidCounter,
            other => other,
        }
    }

    fn note_arrival(&mut self, header: DataHeader) {
        let DataHeader { receiver, counter } = header;
        if !self.arrivals.iter().any(|a| a.count > 0 && a.index == receiver) {
            self.arrivals[1] = self.arrivals[0];
            self.arrivals[0] = Arrivals { index: receiver, newest: 0, count: 0 };
        }
        if let Some(a) = self.arrivals.iter_mut().find(|a| a.index == receiver) {
            a.newest = a.newest.max(counter);
            a.count = a.count.saturating_add(1);
        }
    }

    /// Of the last two sessions, the newer one weighing three times as much.
    fn loss(&self) -> f32 {
        let (mut sum, mut weights) = (0.0, 0.0);
        for (a, weight) in self.arrivals.iter().zip([3.0, 1.0]) {
            if a.count > 0 {
                let expected = a.newest.saturating_add(1).max(a.count);
                sum += weight * (1.0 - a.count as f32 / expected as f32);
                weights += weight;
            }
        }
        if weights > 0.0 { sum / weights } else { 0.0 }
    }
}

fn own_limiter_for(public: &PublicKey) -> Arc<RateLimiter> {
    Arc::new(RateLimiter::new(&x25519::PublicKey::from(public.0), OWN_LIMIT))
}
