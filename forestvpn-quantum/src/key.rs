//! Keys as types: wiped on drop, never printed, compared in constant time.

use core::fmt;

use subtle::ConstantTimeEq;
use zeroize::Zeroize;

use crate::crypto;

/// 32 secret bytes on the heap: moving the owner does not copy the secret, dropping it wipes it.
#[derive(Clone)]
pub(crate) struct Secret(Box<[u8; 32]>);

impl Secret {
    pub(crate) fn zero() -> Self {
        Self(Box::new([0; 32]))
    }

    /// Takes the bytes over and wipes the caller's copy.
    pub(crate) fn take(bytes: &mut [u8; 32]) -> Self {
        let mut secret = Self::zero();
        secret.0.copy_from_slice(bytes);
        bytes.zeroize();
        secret
    }

    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    pub(crate) fn is_zero(&self) -> bool {
        self.0.ct_eq(&[0; 32]).into()
    }
}

impl Drop for Secret {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&*other.0).into()
    }
}
impl Eq for Secret {}

/// A Curve25519 private key, clamped when it is made, so that reading it back shows the clamped key (C-PRIM-5).
#[derive(Clone, PartialEq, Eq)]
pub struct PrivateKey(Secret);

impl PrivateKey {
    /// Clamps `bytes` into a private key.
    pub fn new(mut bytes: [u8; 32]) -> Self {
        //@ C-PRIM-5
        bytes[0] &= 248;
        bytes[31] = (bytes[31] & 127) | 64;
        Self(Secret::take(&mut bytes))
    }

    /// The clamped 32 bytes. Secret: write them only to where the owner asked for them.
    pub fn as_bytes(&self) -> &[u8; 32] {
        self.0.bytes()
    }

    /// The public key that belongs to this private key.
    pub fn public_key(&self) -> PublicKey {
        PublicKey(crypto::x25519_public(self))
    }
}

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PrivateKey(..)")
    }
}

/// A preshared key, mixed into the handshake as psk2 (whitepaper 5.2). All zeros means none: use `Option`.
#[derive(Clone, PartialEq, Eq)]
pub struct PresharedKey(Secret);

impl PresharedKey {
    /// Takes 32 bytes over.
    pub fn new(mut bytes: [u8; 32]) -> Self {
        Self(Secret::take(&mut bytes))
    }

    /// The 32 bytes. Secret: write them only to where the owner asked for them.
    pub fn as_bytes(&self) -> &[u8; 32] {
        self.0.bytes()
    }
}

impl fmt::Debug for PresharedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PresharedKey(..)")
    }
}

/// A Curve25519 public key: the name of a peer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicKey(pub [u8; 32]);

impl PublicKey {
    /// The 32 bytes.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}
