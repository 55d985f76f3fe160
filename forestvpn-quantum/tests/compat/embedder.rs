// An embedder's source as it is written for boringtun 0.7: included twice by tests/compat.rs, once with `wg` being
// boringtun and once with it being this crate. What compiles and runs here needs no change to switch.

use std::net::IpAddr;
use std::sync::Arc;

use rand_core::OsRng;
use wg::noise::errors::WireGuardError;
use wg::noise::handshake::parse_handshake_anon;
use wg::noise::rate_limiter::RateLimiter;
use wg::noise::{Packet, Tunn, TunnResult};
use wg::x25519::{PublicKey, StaticSecret};

use super::{Answer, Host, Identity};

/// One tunnel and its output buffer.
pub(crate) struct Embedder {
    tunn: Tunn,
    buf: Vec<u8>,
}

pub(crate) fn identity() -> Identity {
    let secret = StaticSecret::random_from_rng(OsRng);
    Identity { public: *PublicKey::from(&secret).as_bytes(), secret: secret.to_bytes() }
}

pub(crate) fn limiter(me: &Identity, limit: u64) -> Arc<RateLimiter> {
    Arc::new(RateLimiter::new(&PublicKey::from(me.public), limit))
}

impl Embedder {
    pub(crate) fn new(me: &Identity, peer: [u8; 32], psk: Option<[u8; 32]>, index: u32) -> Self {
        Self::with_limiter(me, peer, psk, index, None)
    }

    pub(crate) fn with_limiter(
        me: &Identity,
        peer: [u8; 32],
        psk: Option<[u8; 32]>,
        index: u32,
        limiter: Option<Arc<RateLimiter>>,
    ) -> Self {
        let secret = StaticSecret::from(me.secret);
        let tunn = Tunn::new(secret, PublicKey::from(peer), psk, Some(25), index, limiter);
        Self { tunn, buf: vec![0; 2048] }
    }

    pub(crate) fn rekey(&mut self, me: &Identity) {
        let secret = StaticSecret::from(me.secret);
        let public = PublicKey::from(&secret);
        self.tunn.set_static_private(secret, public, None);
    }

    pub(crate) fn statistics(&self) -> (bool, usize, usize, bool) {
        let (age, tx, rx, loss, _rtt) = self.tunn.stats();
        assert_eq!(age.is_some(), self.tunn.time_since_last_handshake().is_some());
        assert_eq!(self.tunn.persistent_keepalive(), Some(25));
        (age.is_some(), tx, rx, (0.0..=1.0).contains(&loss))
    }
}

// Every variant by name and no wildcard, as an embedder may have written it.
fn answer(result: TunnResult<'_>) -> Answer {
    match result {
        TunnResult::Done => Answer::Done,
        TunnResult::Err(WireGuardError::ConnectionExpired) => Answer::Err("expired".into()),
        TunnResult::Err(e) => Answer::Err(format!("{e:?}")),
        TunnResult::WriteToNetwork(datagram) => Answer::Net(datagram.to_vec()),
        TunnResult::WriteToTunnelV4(packet, from) => Answer::Tun(packet.to_vec(), IpAddr::V4(from)),
        TunnResult::WriteToTunnelV6(packet, from) => Answer::Tun(packet.to_vec(), IpAddr::V6(from)),
    }
}

impl Host for Embedder {
    fn send(&mut self, packet: &[u8]) -> Answer {
        // Exactly what upstream's documentation asks for.
        let room = (packet.len() + 32).max(148);
        answer(self.tunn.encapsulate(packet, &mut self.buf[..room]))
    }

    fn receive(&mut self, datagram: &[u8]) -> Answer {
        let from = Some(IpAddr::from([192, 0, 2, 1]));
        answer(self.tunn.decapsulate(from, datagram, &mut self.buf))
    }

    fn tick(&mut self) -> Answer {
        answer(self.tunn.update_timers(&mut self.buf))
    }

    fn initiate(&mut self, force: bool) -> Answer {
        answer(self.tunn.format_handshake_initiation(&mut self.buf, force))
    }

    fn expired(&self) -> bool {
        self.tunn.is_expired()
    }
}

/// What a server with many tunnels does first: whose datagram is this? The tunnel's index, or the peer's key.
pub(crate) fn classify(me: &Identity, limiter: &RateLimiter, datagram: &[u8]) -> Result<(u32, Option<[u8; 32]>), Answer> {
    let mut cookie = [0; 64];
    let from = Some(IpAddr::from([192, 0, 2, 1]));
    let parsed = match limiter.verify_packet(from, datagram, &mut cookie) {
        Ok(packet) => packet,
        Err(result) => return Err(answer(result)),
    };
    limiter.reset_count();
    Ok(match parsed {
        Packet::HandshakeInit(p) => {
            let secret = StaticSecret::from(me.secret);
            let public = PublicKey::from(&secret);
            let half = parse_handshake_anon(&secret, &public, &p).map_err(|e| Answer::Err(format!("{e:?}")))?;
            (half.peer_index >> 8, Some(half.peer_static_public))
        }
        Packet::HandshakeResponse(p) => (p.receiver_idx >> 8, None),
        Packet::PacketCookieReply(p) => (p.receiver_idx >> 8, None),
        Packet::PacketData(p) => (p.receiver_idx >> 8, None),
    })
}

pub(crate) fn destination(packet: &[u8]) -> Option<IpAddr> {
    assert!(Tunn::parse_incoming_packet(packet).is_err());
    Tunn::dst_address(packet)
}
