//! Who sends this initiation? For callers that keep many [`Tunn`](super::Tunn)s and have to pick one.

use super::errors::WireGuardError;
use super::packet::HandshakeInit;
use crate::handshake;
use crate::key::{PrivateKey, PublicKey};
use crate::x25519;

/// What the responder learns from the first half of an initiation.
#[derive(Debug)]
pub struct HalfHandshake {
    /// The sender index of the initiation.
    pub peer_index: u32,
    /// The key of whoever claims to speak. Proved only when the handshake completes.
    pub peer_static_public: [u8; 32],
}

/// Decrypts the sender's public key. `static_public` has to be the one of `static_private`. Check mac1 first
/// ([`RateLimiter::verify_packet`](super::rate_limiter::RateLimiter::verify_packet)): this costs a
/// Diffie-Hellman.
///
/// # Errors
/// [`WireGuardError::InvalidAeadTag`] when the message was not made for our key.
pub fn parse_handshake_anon(
    static_private: &x25519::StaticSecret,
    static_public: &x25519::PublicKey,
    packet: &HandshakeInit<'_>,
) -> Result<HalfHandshake, WireGuardError> {
    let private = PrivateKey::new(static_private.to_bytes());
    let public = PublicKey(static_public.to_bytes());
    let introduced = handshake::introduce(&private, &public, packet.message)?;
    Ok(HalfHandshake { peer_index: introduced.index, peer_static_public: introduced.remote.0 })
}
