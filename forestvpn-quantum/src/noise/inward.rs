//! What a [`Tunn`] does with a datagram.

use core::net::IpAddr;

use super::errors::WireGuardError;
use super::packet::{HandshakeInit, HandshakeResponse, Packet, PacketCookieReply, PacketData};
use super::tunn::Tunn;
use super::{TunnResult, When, to_network};
use crate::handshake;
use crate::ip;
use crate::time::{Now, OsEntropy};
use crate::timers::REJECT_AFTER_MESSAGES;
use crate::wire::{self, COOKIE_REPLY, DataHeader, RESPONSE};

/// What came in on the last two sessions, the newer one first, to estimate loss from.
#[derive(Default)]
pub(super) struct Arrivals([Option<Arrived>; 2]);

struct Arrived {
    index: u32,
    newest: u64,
    count: u64,
}

impl Arrivals {
    fn note(&mut self, header: DataHeader) {
        let DataHeader { receiver: index, counter } = header;
        let Self([newer, older]) = self;
        let known = [&mut *newer, &mut *older].into_iter().flatten().find(|a| a.index == index);
        if let Some(a) = known {
            a.newest = a.newest.max(counter);
            a.count = a.count.saturating_add(1);
        } else {
            *older = newer.replace(Arrived { index, newest: counter, count: 1 });
        }
    }

    /// The share of packets that did not come, 0 to 1; the newer session weighs three times as much.
    pub(super) fn loss(&self) -> f32 {
        let (mut sum, mut weights) = (0.0, 0.0);
        for (a, weight) in self.0.iter().zip([3.0, 1.0]) {
            if let Some(a) = a {
                let expected = a.newest.saturating_add(1).max(a.count);
                sum += weight * (1.0 - a.count as f32 / expected as f32);
                weights += weight;
            }
        }
        if weights > 0.0 { sum / weights } else { 0.0 }
    }
}

impl Tunn {
    /// Takes a datagram. When the answer is `WriteToNetwork`, call again with an empty datagram until it is
    /// `Done`: packets that waited come out one by one.
    pub fn decapsulate<'a>(
        &mut self,
        src_addr: Option<IpAddr>,
        datagram: &[u8],
        dst: &'a mut [u8],
    ) -> TunnResult<'a> {
        let now = self.watch.glance();
        self.inward(src_addr, datagram, dst, now)
    }

    /// [`decapsulate`](Self::decapsulate), told the time.
    pub fn decapsulate_at<'a>(
        &mut self,
        src_addr: Option<IpAddr>,
        datagram: &[u8],
        dst: &'a mut [u8],
        now: Now,
    ) -> TunnResult<'a> {
        self.inward(src_addr, datagram, dst, now.into())
    }

    fn inward<'a>(
        &mut self,
        src_addr: Option<IpAddr>,
        datagram: &[u8],
        dst: &'a mut [u8],
        now: When,
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
        now: When,
    ) -> Result<usize, WireGuardError> {
        if dst.len() < room {
            return Err(WireGuardError::DestinationBufferTooSmall);
        }
        self.limiter.judge(source, message, dst, now)
    }

    /// What is ready to go: a packet that waited, or an initiation that is due.
    pub(super) fn pending(&mut self, dst: &mut [u8], now: When) -> Result<usize, WireGuardError> {
        match self.seal(None, dst, now)? {
            0 if self.rekey => self.initiate(dst, now),
            len => Ok(len),
        }
    }

    fn initiation(
        &mut self,
        p: &HandshakeInit<'_>,
        dst: &mut [u8],
        now: When,
    ) -> Result<usize, WireGuardError> {
        let now = self.watch.sharpen(now);
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
        now: When,
    ) -> Result<usize, WireGuardError> {
        let now = self.watch.sharpen(now);
        match self.peer.handshake_index() {
            None => return Err(WireGuardError::UnexpectedPacket),
            Some(index) if index != p.receiver_idx => return Err(WireGuardError::WrongIndex),
            Some(_) => {}
        }
        self.peer.accept_response(&self.local, p.message, now.both())?;
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

    fn cookie(&mut self, p: &PacketCookieReply<'_>, now: When) -> Result<usize, WireGuardError> {
        if !self.peer.uses(p.receiver_idx) {
            return Err(WireGuardError::WrongIndex);
        }
        self.peer.accept_cookie(p.message, now.mono)?;
        Ok(0)
    }

    fn data<'a>(&mut self, p: &PacketData<'_>, dst: &'a mut [u8], now: When) -> TunnResult<'a> {
        let Some(body) = dst.get_mut(..p.body.len()) else {
            return TunnResult::Err(WireGuardError::DestinationBufferTooSmall);
        };
        body.copy_from_slice(p.body);
        let header = DataHeader { receiver: p.receiver_idx, counter: p.counter };
        // Nobody can ask a tunnel for the wall clock of its last handshake.
        let time = Now { mono: now.mono, ..Now::default() };
        let opened = match self.peer.open(header, body, None, None, time) {
            Ok(opened) => opened,
            Err(why) => return TunnResult::Err(self.explain(why.into(), header)),
        };
        self.arrivals.note(header);
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
}
