//! The only file that names a crypto crate.
//!
//! Data packets go through ring's fused assembly (feature `ring`) or through RustCrypto; handshakes use
//! BLAKE2s, X25519 and XChaCha20-Poly1305 from RustCrypto and dalek.

use blake2::digest::consts::U16;
use blake2::digest::{Digest, KeyInit, Mac};
use blake2::{Blake2s256, Blake2sMac};
use chacha20poly1305::XChaCha20Poly1305;
use chacha20poly1305::aead::AeadInOut;
use curve25519_dalek::MontgomeryPoint;
use subtle::ConstantTimeEq;
use zeroize::Zeroize;

use crate::key::{PrivateKey, PublicKey, Secret};
use crate::secret::Wiped;

/// Length of an AEAD tag.
pub(crate) const TAG: usize = 16;

/// BLAKE2s-256 over the concatenation of `parts`.
pub(crate) fn hash(parts: &[&[u8]]) -> [u8; 32] {
    //@ C-PRIM-1
    let mut state = Blake2s256::new();
    parts.iter().for_each(|p| Digest::update(&mut state, p));
    state.finalize().into()
}

/// BLAKE2s-128 keyed with up to 32 bytes: mac1, mac2 and cookies.
pub(crate) fn mac(key: &[u8], parts: &[&[u8]]) -> [u8; 16] {
    // Keys are 16 or 32 bytes by construction, both of which BLAKE2s takes.
    let Ok(mut state) = <Blake2sMac<U16> as KeyInit>::new_from_slice(key) else { return [0; 16] };
    parts.iter().for_each(|p| Mac::update(&mut state, p));
    state.finalize().into_bytes().into()
}

/// Equality in time that does not depend on the bytes (C-PRIM-7).
pub(crate) fn equal(a: &[u8], b: &[u8]) -> bool {
    //@ C-PRIM-7
    a.ct_eq(b).into()
}

/// HMAC (RFC 2104, 64-byte blocks) over BLAKE2s-256, which is not keyed BLAKE2s.
fn hmac(key: &[u8], parts: &[&[u8]]) -> [u8; 32] {
    let mut block = [0u8; 64];
    block.iter_mut().zip(key).for_each(|(b, k)| *b = *k);
    block.iter_mut().for_each(|b| *b ^= 0x36);
    let mut inner = Blake2s256::new();
    Digest::update(&mut inner, block);
    parts.iter().for_each(|p| Digest::update(&mut inner, p));
    let mut inner: [u8; 32] = inner.finalize().into();
    block.iter_mut().for_each(|b| *b ^= 0x36 ^ 0x5c);
    let out = hash(&[&block, &inner]);
    block.zeroize();
    inner.zeroize();
    out
}

/// KDFn of the whitepaper (5.4): `n` outputs of HKDF over HMAC-BLAKE2s (C-PRIM-6).
pub(crate) fn kdf<const N: usize>(key: &[u8], input: &[u8]) -> [Secret; N] {
    //@ C-PRIM-6
    let mut t0 = hmac(key, &[input]);
    let mut previous: Option<Secret> = None;
    let out = core::array::from_fn(|i| {
        let n = [i as u8 + 1];
        let mut t = match &previous {
            None => hmac(&t0, &[&n]),
            Some(p) => hmac(&t0, &[p.bytes(), &n]),
        };
        let secret = Secret::take(&mut t);
        previous = Some(secret.clone());
        secret
    });
    t0.zeroize();
    out
}

/// The public key of a private key.
pub(crate) fn x25519_public(private: &PrivateKey) -> [u8; 32] {
    // The base point has precomputed tables in Edwards form, which the ladder of `x25519` would not use.
    MontgomeryPoint::mul_base_clamped(*private.as_bytes()).to_bytes()
}

/// X25519. `None` when the result is all zeros, that is, when `public` is a low-order point (C-PRIM-4).
pub(crate) fn x25519(private: &PrivateKey, public: &PublicKey) -> Option<Secret> {
    //@ C-PRIM-4
    let mut shared = x25519_dalek::x25519(*private.as_bytes(), public.0);
    let secret = Secret::take(&mut shared);
    (!secret.is_zero()).then_some(secret)
}

/// XChaCha20-Poly1305 of a 16-byte cookie, as cookie replies carry it (C-CK-2).
pub(crate) fn xseal(key: &[u8; 32], nonce: &[u8; 24], aad: &[u8], cookie: &[u8; 16]) -> [u8; 32] {
    let mut out = [0; 32];
    let (text, tag) = out.split_at_mut(16);
    text.copy_from_slice(cookie);
    let cipher = XChaCha20Poly1305::new(key.into());
    if let Ok(t) = cipher.encrypt_inout_detached(nonce.into(), aad, (&mut *text).into()) {
        tag.copy_from_slice(&t);
    }
    out
}

/// Opens what [`xseal`] made. `None` when the tag does not verify.
pub(crate) fn xopen(key: &[u8; 32], nonce: &[u8; 24], aad: &[u8], sealed: &[u8; 32]) -> Option<[u8; 16]> {
    let mut cookie = [0; 16];
    let (text, tag) = sealed.split_at(16);
    cookie.copy_from_slice(text);
    let tag: [u8; 16] = tag.try_into().ok()?;
    let cipher = XChaCha20Poly1305::new(key.into());
    cipher
        .decrypt_inout_detached(nonce.into(), aad, (&mut cookie[..]).into(), &tag.into())
        .ok()
        .map(|()| cookie)
}

#[cfg(feature = "ring")]
type Cipher = ring::aead::LessSafeKey;
#[cfg(not(feature = "ring"))]
type Cipher = chacha20poly1305::ChaCha20Poly1305;

/// 4 zero bytes and the little-endian counter (RFC 8439 layout, C-PRIM-1).
const fn nonce(counter: u64) -> [u8; 12] {
    let mut nonce = [0; 12];
    // In the two words that ring reads: for a word put together from parts the processor waits.
    let (low, high) = nonce.split_at_mut(8);
    low.copy_from_slice(&(counter << 32).to_le_bytes());
    high.copy_from_slice(&((counter >> 32) as u32).to_le_bytes());
    nonce
}

/// One packet in a buffer: `len` bytes of text at `at`, the tag after them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Job {
    pub(crate) at: usize,
    pub(crate) len: usize,
    pub(crate) counter: u64,
}

/// Most packets of one [`TrainKey`] call.
pub(crate) const MOST: usize = 64;
/// Which code encrypts data packets on this machine, in words; `trains` as in
/// [`DeviceConfig::train_cipher`](crate::DeviceConfig::train_cipher).
pub fn cipher(trains: bool) -> &'static str {
    #[cfg(target_arch = "x86_64")]
    let lanes = trains && crate::lanes::able();
    #[cfg(not(target_arch = "x86_64"))]
    let lanes = {
        let _ = trains;
        false
    };
    match (cfg!(feature = "ring"), lanes) {
        (true, false) => "ring",
        (true, true) => "ring, and AVX-512 for trains of packets",
        (false, false) => "RustCrypto",
        (false, true) => "RustCrypto, and AVX-512 for trains of packets",
    }
}

/// A key for data packets: single ones, or up to [`MOST`] at once.
pub(crate) struct TrainKey {
    single: AeadKey,
    #[cfg(target_arch = "x86_64")]
    lanes: Option<Wiped<crate::lanes::Lanes>>,
}

impl TrainKey {
    /// With `trains`, where the processor can, many packets go through its wide registers together.
    pub(crate) fn new(key: &Secret, trains: bool) -> Self {
        #[cfg(not(target_arch = "x86_64"))]
        let _ = trains;
        Self {
            single: AeadKey::new(key),
            #[cfg(target_arch = "x86_64")]
            lanes: trains.then(|| crate::lanes::Lanes::new(key.bytes())).flatten().map(Wiped::new),
        }
    }

    /// As [`AeadKey::seal`], without additional data.
    pub(crate) fn seal(&self, counter: u64, buf: &mut [u8]) {
        self.single.seal(counter, &[], buf);
    }

    /// As [`AeadKey::open`], without additional data.
    pub(crate) fn open(&self, counter: u64, buf: &mut [u8]) -> Option<usize> {
        self.single.open(counter, &[], buf)
    }

    /// Encrypts the text of each job in place and writes its tag behind it. Brings the jobs into another order.
    pub(crate) fn seal_all(&self, bytes: &mut [u8], jobs: &mut [Job]) {
        #[cfg(target_arch = "x86_64")]
        let jobs = match &self.lanes {
            Some(lanes) if jobs.len() >= crate::lanes::FEWEST => {
                // Packets of about one length share their lanes best.
                if !jobs.is_sorted_by_key(|job| core::cmp::Reverse(job.len)) {
                    jobs.sort_unstable_by_key(|job| core::cmp::Reverse(job.len));
                }
                let (together, singly) = jobs.split_at(crate::lanes::worth(jobs));
                if lanes.seal(bytes, together) { singly } else { &*jobs }
            }
            _ => &*jobs,
        };
        #[cfg(not(target_arch = "x86_64"))]
        let jobs = &*jobs;
        for Job { at, len, counter } in jobs {
            if let Some(buf) = bytes.get_mut(*at..at.saturating_add(len + TAG)) {
                self.seal(*counter, buf);
            }
        }
    }

    /// Verifies and decrypts each job in place. Gives one bit a job, set for those that are right; the text of the
    /// others is worthless.
    pub(crate) fn open_all(&self, bytes: &mut [u8], jobs: &[Job]) -> u64 {
        #[cfg(target_arch = "x86_64")]
        let (mut good, first) = match &self.lanes {
            Some(lanes) if jobs.len() >= crate::lanes::FEWEST => {
                let first = crate::lanes::worth(jobs);
                (lanes.open(bytes, jobs.get(..first).unwrap_or_default()), first)
            }
            _ => (0, 0),
        };
        #[cfg(not(target_arch = "x86_64"))]
        let (mut good, first) = (0, 0);
        for (i, Job { at, len, counter }) in jobs.iter().enumerate().skip(first) {
            if let Some(buf) = bytes.get_mut(*at..at + len + TAG) {
                good |= u64::from(self.open(*counter, buf).is_some()) << i;
            }
        }
        good
    }
}

/// A ChaCha20-Poly1305 key, expanded once, wiped on drop.
pub(crate) struct AeadKey(Wiped<Cipher>);

#[cfg(feature = "ring")]
impl AeadKey {
    pub(crate) fn new(key: &Secret) -> Self {
        use ring::aead::{CHACHA20_POLY1305, LessSafeKey, UnboundKey};
        #[expect(clippy::expect_used, reason = "the length is right by type, and no packet comes by here")]
        let unbound = UnboundKey::new(&CHACHA20_POLY1305, key.bytes()).expect("the key has 32 bytes");
        Self(Wiped::new(LessSafeKey::new(unbound)))
    }

    /// Encrypts `buf[..len - 16]` in place and writes the tag into the last 16 bytes.
    pub(crate) fn seal(&self, counter: u64, aad: &[u8], buf: &mut [u8]) {
        let Some(at) = buf.len().checked_sub(TAG) else { return };
        let (text, tag) = buf.split_at_mut(at);
        let nonce = ring::aead::Nonce::assume_unique_for_key(nonce(counter));
        if let Ok(t) = self.0.seal_in_place_separate_tag(nonce, ring::aead::Aad::from(aad), text) {
            tag.copy_from_slice(t.as_ref());
        }
    }

    /// Verifies and decrypts `buf` in place; the plaintext is its first `len - 16` bytes.
    pub(crate) fn open(&self, counter: u64, aad: &[u8], buf: &mut [u8]) -> Option<usize> {
        let nonce = ring::aead::Nonce::assume_unique_for_key(nonce(counter));
        self.0.open_in_place(nonce, ring::aead::Aad::from(aad), buf).ok().map(|text| text.len())
    }
}

#[cfg(not(feature = "ring"))]
impl AeadKey {
    pub(crate) fn new(key: &Secret) -> Self {
        Self(Wiped::new(chacha20poly1305::ChaCha20Poly1305::new(key.bytes().into())))
    }

    /// Encrypts `buf[..len - 16]` in place and writes the tag into the last 16 bytes.
    pub(crate) fn seal(&self, counter: u64, aad: &[u8], buf: &mut [u8]) {
        let Some(at) = buf.len().checked_sub(TAG) else { return };
        let (text, tag) = buf.split_at_mut(at);
        if let Ok(t) = self.0.encrypt_inout_detached(&nonce(counter).into(), aad, (&mut *text).into()) {
            tag.copy_from_slice(&t);
        }
    }

    /// Verifies and decrypts `buf` in place; the plaintext is its first `len - 16` bytes.
    pub(crate) fn open(&self, counter: u64, aad: &[u8], buf: &mut [u8]) -> Option<usize> {
        let at = buf.len().checked_sub(TAG)?;
        let (text, tag) = buf.split_at_mut(at);
        let tag: [u8; TAG] = (&*tag).try_into().ok()?;
        self.0.decrypt_inout_detached(&nonce(counter).into(), aad, text.into(), &tag.into()).ok()?;
        Some(at)
    }
}

#[cfg(test)]
#[path = "../tests/unit/crypto_vectors.rs"]
mod tests;
