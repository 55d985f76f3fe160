//! Noise_IKpsk2 as WireGuard uses it (whitepaper 5.4): pure functions over fixed-size messages.
//!
//! `peer.rs` calls these, keeps the state between them and decides when they may run.

use core::time::Duration;

use zeroize::Zeroize;

use crate::crypto::{self, AeadKey, TAG};
use crate::event::Discard;
use crate::key::{PresharedKey, PrivateKey, PublicKey, Secret};
use crate::time::Entropy;
use crate::wire::{self, INITIATION, MACS, RESPONSE};

//@ C-PRIM-2
#[cfg(test)]
pub(crate) const CONSTRUCTION: &[u8; 37] = b"Noise_IKpsk2_25519_ChaChaPoly_BLAKE2s";
#[cfg(test)]
pub(crate) const IDENTIFIER: &[u8; 34] = b"WireGuard v1 zx2c4 Jason@zx2c4.com";

//@ C-PRIM-3
/// HASH(CONSTRUCTION); a test computes it.
pub(crate) const CHAIN_0: [u8; 32] = [
    0x60, 0xe2, 0x6d, 0xae, 0xf3, 0x27, 0xef, 0xc0, 0x2e, 0xc3, 0x35, 0xe2, 0xa0, 0x25, 0xd2, 0xd0, 0x16,
    0xeb, 0x42, 0x06, 0xf8, 0x72, 0x77, 0xf5, 0x2d, 0x38, 0xd1, 0x98, 0x8b, 0x78, 0xcd, 0x36,
];
/// HASH(CHAIN_0 || IDENTIFIER); a test computes it.
pub(crate) const HASH_0: [u8; 32] = [
    0x22, 0x11, 0xb3, 0x61, 0x08, 0x1a, 0xc5, 0x66, 0x69, 0x12, 0x43, 0xdb, 0x45, 0x8a, 0xd5, 0x32, 0x2d,
    0x9c, 0x6c, 0x66, 0x22, 0x93, 0xe8, 0xb7, 0x0e, 0xe1, 0x9c, 0x65, 0xba, 0x07, 0x9e, 0xf3,
];

/// A TAI64N timestamp, compared as a big-endian byte string (C-HS-3).
pub(crate) type Timestamp = [u8; 12];

/// Makes the timestamps for one peer, which only grow, whatever the wall clock does.
#[derive(Debug, Default)]
pub(crate) struct TimestampSource {
    last: Duration,
}

/// Timestamps are rounded down to this many nanoseconds, so that they do not betray the load of the machine.
const WHITENER: u32 = 1 << 24;

impl TimestampSource {
    /// The timestamp for an initiation at `unix` (wall clock).
    pub(crate) fn next(&mut self, unix: Duration) -> Timestamp {
        //@ C-HS-4
        let whole = Duration::new(unix.as_secs(), unix.subsec_nanos() & !(WHITENER - 1));
        let next = if self.last == Duration::ZERO {
            whole
        } else {
            let least = self.last + Duration::from_nanos(WHITENER.into());
            // The step may carry past a whole second, where rounding starts anew.
            let least = Duration::new(
                least.as_secs(),
                least.subsec_nanos().div_ceil(WHITENER).saturating_mul(WHITENER).min(999_999_999),
            );
            whole.max(least)
        };
        self.last = next;
        let mut out = [0; 12];
        let seconds = 0x4000_0000_0000_000a_u64.saturating_add(next.as_secs());
        wire::put(&mut out, 0, &seconds.to_be_bytes());
        wire::put(&mut out, 8, &next.subsec_nanos().to_be_bytes());
        out
    }
}

/// Chaining key and transcript hash.
pub(crate) struct Symmetric {
    chain: Secret,
    hash: [u8; 32],
}

impl Symmetric {
    /// The state both sides begin with: the responder's key is known to both.
    pub(crate) fn new(responder: &PublicKey) -> Self {
        Self::with_hash(HASH_0, responder)
    }

    /// The same for another prologue; only test vectors have one.
    pub(crate) fn with_hash(hash: [u8; 32], responder: &PublicKey) -> Self {
        let mut chain = CHAIN_0;
        Self { chain: Secret::take(&mut chain), hash: crypto::hash(&[&hash, responder.as_bytes()]) }
    }

    fn mix_hash(&mut self, bytes: &[u8]) {
        self.hash = crypto::hash(&[&self.hash, bytes]);
    }

    /// A public ephemeral goes into both, as in every psk pattern.
    fn mix_ephemeral(&mut self, ephemeral: &PublicKey) {
        self.mix_hash(ephemeral.as_bytes());
        let [chain] = crypto::kdf(self.chain.bytes(), ephemeral.as_bytes());
        self.chain = chain;
    }

    fn mix_dh(&mut self, shared: &Secret) {
        let [chain] = crypto::kdf(self.chain.bytes(), shared.bytes());
        self.chain = chain;
    }

    fn mix_dh_key(&mut self, shared: &Secret) -> Secret {
        let [chain, key] = crypto::kdf(self.chain.bytes(), shared.bytes());
        self.chain = chain;
        key
    }

    fn mix_psk(&mut self, psk: Option<&PresharedKey>) -> Secret {
        let psk: &[u8; 32] = psk.map_or(&[0; 32], PresharedKey::as_bytes);
        let [chain, tau, key] = crypto::kdf(self.chain.bytes(), psk);
        self.chain = chain;
        self.mix_hash(tau.bytes());
        key
    }

    /// Seals `plain` into the start of `out`; the rest of `out` is where the tag goes.
    fn seal(&mut self, key: &Secret, plain: &[u8], out: &mut [u8]) {
        //@ C-HS-1
        wire::put(out, 0, plain);
        AeadKey::new(key).seal(0, &self.hash, out);
        self.mix_hash(out);
    }

    /// Opens `sealed` into the start of `out`, which is as long as `sealed`.
    fn open(&mut self, key: &Secret, sealed: &[u8], out: &mut [u8]) -> Result<(), Discard> {
        wire::put(out, 0, sealed);
        AeadKey::new(key).open(0, &self.hash, out).ok_or(Discard::BadTag)?;
        self.mix_hash(sealed);
        Ok(())
    }

    /// The transport keys: the initiator's sending key first.
    fn split(self) -> [Secret; 2] {
        crypto::kdf(self.chain.bytes(), &[])
    }

    #[cfg(test)]
    pub(crate) fn parts(&self) -> ([u8; 32], [u8; 32]) {
        (*self.chain.bytes(), self.hash)
    }
}

/// What the initiator remembers until the response comes.
pub(crate) struct Initiated {
    pub(crate) index: u32,
    ephemeral: PrivateKey,
    symmetric: Symmetric,
}

impl Initiated {
    #[cfg(test)]
    pub(crate) fn symmetric(&self) -> &Symmetric {
        &self.symmetric
    }
}

/// What a handshake ends in, for either side.
pub(crate) struct Derived {
    pub(crate) send: Secret,
    pub(crate) receive: Secret,
    pub(crate) local: u32,
    pub(crate) remote: u32,
}

/// A fresh ephemeral key (C-HS-9).
pub(crate) fn ephemeral(entropy: &mut dyn Entropy) -> PrivateKey {
    //@ C-HS-9
    let mut bytes = [0; 32];
    entropy.fill(&mut bytes);
    let key = PrivateKey::new(bytes);
    bytes.zeroize();
    key
}

/// Writes `e, es, s, ss, payload` into `out`, which has room for exactly that.
pub(crate) fn write_initiation(
    mut symmetric: Symmetric,
    ephemeral: &PrivateKey,
    local: &PublicKey,
    remote: &PublicKey,
    static_static: &Secret,
    payload: &[u8],
    out: &mut [u8],
) -> Option<Symmetric> {
    let public = ephemeral.public_key();
    let (e, rest) = out.split_at_mut_checked(32)?;
    let (s, p) = rest.split_at_mut_checked(32 + TAG)?;
    e.copy_from_slice(public.as_bytes());
    symmetric.mix_ephemeral(&public);
    let key = symmetric.mix_dh_key(&crypto::x25519(ephemeral, remote)?);
    symmetric.seal(&key, local.as_bytes(), s);
    let key = symmetric.mix_dh_key(static_static);
    symmetric.seal(&key, payload, p);
    Some(symmetric)
}

/// An initiation message without MACs. `None` when the peer's key is a low-order point (C-PRIM-4).
pub(crate) fn initiate(
    ephemeral: PrivateKey,
    local: &PublicKey,
    remote: &PublicKey,
    static_static: &Secret,
    timestamp: &Timestamp,
    index: u32,
) -> Option<([u8; INITIATION], Initiated)> {
    let mut message = [0; INITIATION];
    wire::put(&mut message, 0, &wire::TYPE_INITIATION.to_le_bytes());
    wire::put(&mut message, 4, &index.to_le_bytes());
    let symmetric = Symmetric::new(remote);
    let noise = message.get_mut(8..INITIATION - MACS)?;
    let symmetric = write_initiation(symmetric, &ephemeral, local, remote, static_static, timestamp, noise)?;
    Some((message, Initiated { index, ephemeral, symmetric }))
}

/// An initiation whose static key was decrypted: now the responder knows who claims to speak.
pub(crate) struct Introduced {
    pub(crate) remote: PublicKey,
    pub(crate) index: u32,
    ephemeral: PublicKey,
    symmetric: Symmetric,
    sealed_payload: [u8; 12 + TAG],
}

/// Reads `e, es, s` of an initiation (C-HS-2: before anything that belongs to a peer).
//@ C-SIL-2
// Whoever has `local` can do this with a recording: who called is not forward secret, whatever the PSK.
pub(crate) fn introduce(
    local: &PrivateKey,
    public: &PublicKey,
    message: &[u8; INITIATION],
) -> Result<Introduced, Discard> {
    let mut symmetric = Symmetric::new(public);
    let ephemeral = PublicKey(wire::array_at(message, 8));
    symmetric.mix_ephemeral(&ephemeral);
    let key = symmetric.mix_dh_key(&crypto::x25519(local, &ephemeral).ok_or(Discard::BadTag)?);
    let mut remote = [0; 32 + TAG];
    symmetric.open(&key, &wire::array_at::<{ 32 + TAG }>(message, 40), &mut remote)?;
    Ok(Introduced {
        remote: PublicKey(wire::array_at(&remote, 0)),
        index: wire::u32_at(message, 4),
        ephemeral,
        symmetric,
        sealed_payload: wire::array_at(message, 88),
    })
}

impl Introduced {
    /// Reads `ss, payload`: gives the timestamp, and the state to respond from.
    pub(crate) fn timestamp(mut self, static_static: &Secret) -> Result<(Timestamp, Self), Discard> {
        let key = self.symmetric.mix_dh_key(static_static);
        let mut timestamp = [0; 12 + TAG];
        let sealed = self.sealed_payload;
        self.symmetric.open(&key, &sealed, &mut timestamp)?;
        Ok((wire::array_at(&timestamp, 0), self))
    }

    #[cfg(test)]
    pub(crate) fn symmetric(&self) -> &Symmetric {
        &self.symmetric
    }

    #[cfg(test)]
    pub(crate) fn for_vector(remote: PublicKey, ephemeral: PublicKey, symmetric: Symmetric) -> Self {
        Self { remote, index: 0, ephemeral, symmetric, sealed_payload: [0; 28] }
    }
}

/// Writes `e, ee, se, psk, payload` into `out`, which has room for exactly that.
pub(crate) fn write_response(
    introduced: Introduced,
    ephemeral: &PrivateKey,
    psk: Option<&PresharedKey>,
    payload: &[u8],
    out: &mut [u8],
) -> Option<Symmetric> {
    let Introduced { remote, ephemeral: remote_ephemeral, mut symmetric, .. } = introduced;
    let public = ephemeral.public_key();
    let (e, p) = out.split_at_mut_checked(32)?;
    e.copy_from_slice(public.as_bytes());
    symmetric.mix_ephemeral(&public);
    symmetric.mix_dh(&crypto::x25519(ephemeral, &remote_ephemeral)?);
    symmetric.mix_dh(&crypto::x25519(ephemeral, &remote)?);
    let key = symmetric.mix_psk(psk);
    symmetric.seal(&key, payload, p);
    Some(symmetric)
}

/// A response message without MACs, and the session it begins. `None` on a zero Diffie-Hellman result.
pub(crate) fn respond(
    introduced: Introduced,
    ephemeral: &PrivateKey,
    psk: Option<&PresharedKey>,
    local: u32,
) -> Option<([u8; RESPONSE], Derived)> {
    let remote = introduced.index;
    let mut message = [0; RESPONSE];
    wire::put(&mut message, 0, &wire::TYPE_RESPONSE.to_le_bytes());
    wire::put(&mut message, 4, &local.to_le_bytes());
    wire::put(&mut message, 8, &remote.to_le_bytes());
    let noise = message.get_mut(12..RESPONSE - MACS)?;
    let [receive, send] = write_response(introduced, ephemeral, psk, &[], noise)?.split();
    Some((message, Derived { send, receive, local, remote }))
}

/// Reads a response to `state`. The state stays usable: a forged response must not end the handshake.
pub(crate) fn complete(
    state: &Initiated,
    local: &PrivateKey,
    psk: Option<&PresharedKey>,
    message: &[u8; RESPONSE],
) -> Result<Derived, Discard> {
    let mut symmetric = Symmetric { chain: state.symmetric.chain.clone(), hash: state.symmetric.hash };
    let ephemeral = PublicKey(wire::array_at(message, 12));
    symmetric.mix_ephemeral(&ephemeral);
    symmetric.mix_dh(&crypto::x25519(&state.ephemeral, &ephemeral).ok_or(Discard::BadTag)?);
    symmetric.mix_dh(&crypto::x25519(local, &ephemeral).ok_or(Discard::BadTag)?);
    let key = symmetric.mix_psk(psk);
    symmetric.open(&key, &wire::array_at::<TAG>(message, 44), &mut [0; TAG])?;
    let [send, receive] = symmetric.split();
    Ok(Derived { send, receive, local: state.index, remote: wire::u32_at(message, 4) })
}

#[cfg(test)]
#[path = "../tests/unit/transcripts.rs"]
mod transcripts;
