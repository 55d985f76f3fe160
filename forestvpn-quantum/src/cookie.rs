//! mac1, mac2 and cookies (whitepaper 5.4.4, 5.4.7): what we check and what we send.

use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use zeroize::Zeroize;

use crate::crypto::{self, TAG};
use crate::event::Discard;
use crate::key::PublicKey;
use crate::time::{Entropy, Instant};
use crate::wire::{self, COOKIE_REPLY, MACS};

/// A cookie secret is replaced when it is older.
const SECRET_MAX_AGE: Duration = Duration::from_secs(120);
/// A received cookie is used no longer: 5 s before its maker may replace the secret.
const COOKIE_MAX_AGE: Duration = Duration::from_secs(115);

const LABEL_MAC1: &[u8; 8] = b"mac1----";
const LABEL_COOKIE: &[u8; 8] = b"cookie--";

/// Splits a handshake message into what mac1 covers, mac1 and mac2.
fn split(message: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let (body, macs) = message.split_at_checked(message.len().checked_sub(MACS)?)?;
    let (mac1, mac2) = macs.split_at_checked(TAG)?;
    Some((body, mac1, mac2))
}

/// Our side: checks the MACs of arriving handshake messages, makes cookie replies.
pub(crate) struct Checker {
    mac1_key: [u8; 32],
    cookie_key: [u8; 32],
    secret: [u8; 32],
    secret_born: Option<Instant>,
}

impl Checker {
    /// For messages addressed to `public`.
    pub(crate) fn new(public: &PublicKey) -> Self {
        Self {
            mac1_key: crypto::hash(&[LABEL_MAC1, public.as_bytes()]),
            cookie_key: crypto::hash(&[LABEL_COOKIE, public.as_bytes()]),
            secret: [0; 32],
            secret_born: None,
        }
    }

    /// Is mac1 right for our public key?
    pub(crate) fn mac1_ok(&self, message: &[u8]) -> bool {
        //@ C-MAC-1
        split(message)
            .is_some_and(|(body, mac1, _)| crypto::equal(mac1, &crypto::mac(&self.mac1_key, &[body])))
    }

    /// The cookie of a source address, under a secret that is at most 120 s old.
    pub(crate) fn cookie(&mut self, source: SocketAddr, now: Instant, entropy: &mut dyn Entropy) -> [u8; 16] {
        //@ C-CK-1
        if self.secret_born.is_none_or(|born| now.since(born) >= SECRET_MAX_AGE) {
            entropy.fill(&mut self.secret);
            self.secret_born = Some(now);
        }
        let port = source.port().to_be_bytes();
        match source.ip() {
            IpAddr::V4(ip) => crypto::mac(&self.secret, &[&ip.octets(), &port]),
            IpAddr::V6(ip) => crypto::mac(&self.secret, &[&ip.octets(), &port]),
        }
    }

    /// Does mac2 prove that `cookie` reached the sender?
    pub(crate) fn mac2_ok(&self, message: &[u8], cookie: &[u8; 16]) -> bool {
        let Some((covered, mac2)) =
            message.len().checked_sub(TAG).and_then(|at| message.split_at_checked(at))
        else {
            return false;
        };
        crypto::equal(mac2, &crypto::mac(cookie, &[covered]))
    }

    /// The reply that hands `cookie` to the sender of `message`.
    pub(crate) fn reply(
        &self,
        message: &[u8],
        cookie: &[u8; 16],
        entropy: &mut dyn Entropy,
    ) -> [u8; COOKIE_REPLY] {
        //@ C-CK-2
        let mut out = [0; COOKIE_REPLY];
        let mut nonce = [0; 24];
        entropy.fill(&mut nonce);
        let mac1 = split(message).map_or(&[][..], |(_, mac1, _)| mac1);
        wire::put(&mut out, 0, &wire::TYPE_COOKIE_REPLY.to_le_bytes());
        wire::put(&mut out, 4, &wire::u32_at(message, 4).to_le_bytes());
        wire::put(&mut out, 8, &nonce);
        wire::put(&mut out, 32, &crypto::xseal(&self.cookie_key, &nonce, mac1, cookie));
        out
    }
}

impl Drop for Checker {
    fn drop(&mut self) {
        self.secret.zeroize();
    }
}

/// The peer's side: signs what we send to it, keeps the cookie it gave us.
pub(crate) struct Signer {
    mac1_key: [u8; 32],
    cookie_key: [u8; 32],
    cookie: Option<([u8; 16], Instant)>,
    /// mac1 of the last message sent, until a cookie reply to it was consumed.
    sent_mac1: Option<[u8; 16]>,
}

impl Signer {
    /// For messages to the peer called `public`.
    pub(crate) fn new(public: &PublicKey) -> Self {
        Self {
            mac1_key: crypto::hash(&[LABEL_MAC1, public.as_bytes()]),
            cookie_key: crypto::hash(&[LABEL_COOKIE, public.as_bytes()]),
            cookie: None,
            sent_mac1: None,
        }
    }

    /// Fills in mac1, and mac2 when we hold a cookie that is young enough (else it stays zero).
    pub(crate) fn sign(&mut self, message: &mut [u8], now: Instant) {
        //@ C-MAC-1
        let Some(at) = message.len().checked_sub(MACS) else { return };
        let mac1 = crypto::mac(&self.mac1_key, &[message.get(..at).unwrap_or_default()]);
        wire::put(message, at, &mac1);
        self.sent_mac1 = Some(mac1);
        //@ C-MAC-2
        if let Some((cookie, born)) = &self.cookie
            && now.since(*born) < COOKIE_MAX_AGE
        {
            let mac2 = crypto::mac(cookie, &[message.get(..at + TAG).unwrap_or_default()]);
            wire::put(message, at + TAG, &mac2);
        }
    }

    /// Takes the cookie out of a reply to the last message sent. Nothing changes on failure.
    pub(crate) fn consume(&mut self, reply: &[u8; COOKIE_REPLY], now: Instant) -> Result<(), Discard> {
        //@ C-CK-3
        let mac1 = self.sent_mac1.as_ref().ok_or(Discard::BadCookie)?;
        let (nonce, sealed) = (wire::array_at(reply, 8), wire::array_at(reply, 32));
        let cookie = crypto::xopen(&self.cookie_key, &nonce, mac1, &sealed).ok_or(Discard::BadCookie)?;
        self.cookie = Some((cookie, now));
        self.sent_mac1 = None;
        Ok(())
    }
}

impl Drop for Signer {
    fn drop(&mut self) {
        if let Some((cookie, _)) = &mut self.cookie {
            cookie.zeroize();
        }
    }
}
