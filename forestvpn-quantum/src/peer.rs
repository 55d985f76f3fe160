//! One peer: handshake, three keypairs, timers, endpoint and waiting packets. The machine under both
//! [`Device`](crate::Device) and [`Tunn`](crate::noise::Tunn), neither of which adds protocol of its own.

use core::net::SocketAddr;
use core::time::Duration;
use std::sync::Arc;

use crate::batch::Endpoint;
use crate::cookie::{Checker, Signer};
use crate::crypto::{self, Job};
use crate::event::Discard;
use crate::handshake::{self, Derived, Initiated, Introduced, Timestamp, TimestampSource};
use crate::key::{PresharedKey, PrivateKey, PublicKey, Secret};
use crate::session::{OpenKey, SealKey};
use crate::staging::Staging;
use crate::time::{Entropy, Instant, Now};
use crate::timers::{
    INITIATION_INTERVAL, KEEPALIVE_TIMEOUT, REJECT_AFTER_TIME, REKEY_AFTER_MESSAGES, REKEY_AFTER_TIME,
    REKEY_TIMEOUT, Timers,
};
use crate::wire::{COOKIE_REPLY, DATA_OVERHEAD, DataHeader, INITIATION, RESPONSE};

/// Our own side: one per device.
pub(crate) struct Local {
    pub(crate) private: PrivateKey,
    pub(crate) public: PublicKey,
    pub(crate) checker: Checker,
    /// Sessions may use the cipher for many packets at once, where the processor has it.
    pub(crate) trains: bool,
}

impl Local {
    pub(crate) fn new(private: PrivateKey, trains: bool) -> Self {
        let public = private.public_key();
        Self { private, public, checker: Checker::new(&public), trains }
    }
}

/// Bytes and times of a peer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PeerStats {
    pub(crate) tx_bytes: u64,
    pub(crate) rx_bytes: u64,
    /// Wall clock of the last completed handshake (C-SES-9).
    pub(crate) last_handshake: Option<Duration>,
}

/// One session: both halves and what the timers need to know about it.
struct Keypair {
    seal: Arc<SealKey>,
    open: OpenKey,
    initiator: bool,
    /// Cleared when our private key changed: receiving goes on, sending does not (C-HS-10).
    sending: bool,
}

/// The three slots of a peer (C-SES-1..3).
#[derive(Default)]
struct Keypairs {
    previous: Option<Box<Keypair>>,
    current: Option<Box<Keypair>>,
    next: Option<Box<Keypair>>,
}

/// Indices whose keypairs are gone; whoever keeps a table frees them.
pub(crate) type Freed = [Option<u32>; 3];

fn index_of(keypair: Option<Box<Keypair>>) -> Option<u32> {
    keypair.map(|k| k.open.local())
}

/// What a successfully opened data packet changed beside the counters.
#[derive(Default)]
pub(crate) struct Opened {
    /// Length of the plaintext; 0 is a keepalive.
    pub(crate) len: usize,
    /// The packet confirmed a new session: packets that wait may go now.
    pub(crate) confirmed: bool,
    /// An index that went with the session.
    pub(crate) freed: Option<u32>,
    /// The session is near its end and ours to renew.
    pub(crate) rekey: bool,
    /// The peer was heard at a new address.
    pub(crate) roamed: bool,
}

/// One peer.
pub(crate) struct Peer {
    pub(crate) public: PublicKey,
    pub(crate) psk: Option<PresharedKey>,
    /// X25519 of both static keys; `None` when it is zero or we have no key (C-PRIM-4).
    static_static: Option<Secret>,
    /// As in [`Local`].
    trains: bool,
    initiated: Option<Box<Initiated>>,
    keypairs: Keypairs,
    pub(crate) timers: Timers,
    signer: Signer,
    /// One per peer: a shared one would run ahead of the clock when many peers are called at once, and lock us
    /// out after a restart.
    pub(crate) timestamps: TimestampSource,
    latest_timestamp: Timestamp,
    last_consumed: Option<Instant>,
    pub(crate) endpoint: Option<Endpoint>,
    pub(crate) staging: Staging,
    pub(crate) stats: PeerStats,
}

impl Peer {
    /// `jitter` decorrelates the retransmissions of peers.
    pub(crate) fn new(public: PublicKey, local: Option<&Local>, jitter: u64) -> Self {
        let mut peer = Self {
            public,
            psk: None,
            static_static: None,
            trains: false,
            initiated: None,
            keypairs: Keypairs::default(),
            timers: Timers::new(jitter),
            signer: Signer::new(&public),
            timestamps: TimestampSource::default(),
            latest_timestamp: [0; 12],
            last_consumed: None,
            endpoint: None,
            staging: Staging::default(),
            stats: PeerStats::default(),
        };
        peer.set_local(local);
        peer
    }

    fn set_local(&mut self, local: Option<&Local>) {
        //@ C-PRIM-4
        self.static_static = local.and_then(|l| crypto::x25519(&l.private, &self.public));
        self.trains = local.is_some_and(|l| l.trains);
    }

    /// Our private key changed (C-HS-10). Gives the index of the handshake that ended.
    pub(crate) fn rekey_local(&mut self, local: Option<&Local>) -> Option<u32> {
        //@ C-HS-10
        self.set_local(local);
        for keypair in [&mut self.keypairs.current, &mut self.keypairs.next].into_iter().flatten() {
            keypair.sending = false;
        }
        self.timers.forget_last_initiation();
        self.clear_handshake()
    }

    /// The index of the initiation that waits for a response.
    pub(crate) fn handshake_index(&self) -> Option<u32> {
        self.initiated.as_ref().map(|i| i.index)
    }

    /// Ends an outstanding initiation; gives its index.
    pub(crate) fn clear_handshake(&mut self) -> Option<u32> {
        self.initiated.take().map(|i| i.index)
    }

    /// Forgets handshake and sessions; static keys, PSK and timestamp stay (C-SES-7).
    pub(crate) fn wipe(&mut self) -> ([Option<u32>; 3], Option<u32>) {
        //@ C-SES-7
        let Keypairs { previous, current, next } = core::mem::take(&mut self.keypairs);
        ([index_of(previous), index_of(current), index_of(next)], self.clear_handshake())
    }

    /// Is `index` alive: does our handshake or one of the sessions go by it?
    pub(crate) fn uses(&self, index: u32) -> bool {
        self.handshake_index() == Some(index) || self.opener(index).is_some()
    }

    /// Why a counter was refused: too old for the window of its session (`true`), or seen before.
    pub(crate) fn fell_out(&self, header: DataHeader) -> bool {
        self.opener(header.receiver).is_some_and(|open| open.fell_out(header.counter))
    }

    fn opener(&self, index: u32) -> Option<&OpenKey> {
        let Keypairs { previous, current, next } = &self.keypairs;
        [current, next, previous].into_iter().flatten().map(|k| &k.open).find(|open| open.local() == index)
    }

    /// Does the peer hold any session?
    pub(crate) const fn has_session(&self) -> bool {
        self.keypairs.current.is_some() || self.keypairs.next.is_some() || self.keypairs.previous.is_some()
    }

    /// Age of the session we send with, when there is one.
    pub(crate) fn session_age(&self, now: Instant) -> Option<Duration> {
        self.keypairs.current.as_ref().map(|k| k.seal.age(now))
    }

    // -- handshake ------------------------------------------------------------------------------------

    /// A new initiation; the caller allocated `index` and has freed the one before. `None` when no handshake
    /// with this peer is possible (no key of ours, low-order key of theirs).
    pub(crate) fn initiate(
        &mut self,
        local: &Local,
        index: u32,
        now: Now,
        entropy: &mut dyn Entropy,
    ) -> Option<[u8; INITIATION]> {
        //@ C-HS-6
        let static_static = self.static_static.as_ref()?;
        let timestamp = self.timestamps.next(now.unix);
        let (mut message, state) = handshake::initiate(
            handshake::ephemeral(entropy),
            &local.public,
            &self.public,
            static_static,
            &timestamp,
            index,
        )?;
        self.signer.sign(&mut message, now.mono);
        self.initiated = Some(Box::new(state));
        self.timers.initiated(now.mono);
        Some(message)
    }

    /// Takes an initiation whose static key is this peer's: all checks that are left (C-HS-2). On success an
    /// outstanding initiation of ours is over; its index is given.
    pub(crate) fn accept_initiation(
        &mut self,
        introduced: Introduced,
        now: Instant,
    ) -> Result<(Introduced, Option<u32>), Discard> {
        //@ C-HS-2
        let static_static = self.static_static.as_ref().ok_or(Discard::NoKey)?;
        let (timestamp, introduced) = introduced.timestamp(static_static)?;
        //@ C-HS-3
        if timestamp <= self.latest_timestamp {
            return Err(Discard::OldTimestamp);
        }
        //@ C-HS-5
        if self.last_consumed.is_some_and(|last| now.since(last) < INITIATION_INTERVAL) {
            return Err(Discard::TooFrequent);
        }
        self.latest_timestamp = timestamp;
        self.last_consumed = Some(now);
        let ended = self.clear_handshake();
        if ended.is_some() {
            self.timers.crossed();
        }
        Ok((introduced, ended))
    }

    /// The response to an accepted initiation, and the indices of the sessions it replaced. `None` when a
    /// Diffie-Hellman result is zero.
    pub(crate) fn respond(
        &mut self,
        introduced: Introduced,
        index: u32,
        now: Instant,
        entropy: &mut dyn Entropy,
    ) -> Option<([u8; RESPONSE], Freed)> {
        //@ C-HS-8
        let ephemeral = handshake::ephemeral(entropy);
        let (mut message, derived) = handshake::respond(introduced, &ephemeral, self.psk.as_ref(), index)?;
        self.signer.sign(&mut message, now);
        //@ C-SES-2
        let new = self.keypair(&derived, false, now);
        let keypairs = &mut self.keypairs;
        let old_next = keypairs.next.replace(new);
        let old_previous = keypairs.previous.take();
        self.timers.responded(now);
        Some((message, [index_of(old_next), index_of(old_previous), None]))
    }

    /// Takes the response to our initiation: from here on we may send. Gives the indices of the sessions it
    /// replaced.
    pub(crate) fn accept_response(
        &mut self,
        local: &Local,
        message: &[u8; RESPONSE],
        now: Now,
    ) -> Result<Freed, Discard> {
        let state = self.initiated.as_ref().ok_or(Discard::UnknownIndex)?;
        let derived = handshake::complete(state, &local.private, self.psk.as_ref(), message)?;
        self.initiated = None;
        //@ C-SES-1
        let new = self.keypair(&derived, true, now.mono);
        let keypairs = &mut self.keypairs;
        let dropped = keypairs.previous.take();
        let current = keypairs.current.replace(new);
        let freed = match keypairs.next.take() {
            Some(next) => {
                keypairs.previous = Some(next);
                [index_of(dropped), index_of(current), None]
            }
            None => {
                keypairs.previous = current;
                [index_of(dropped), None, None]
            }
        };
        self.timers.derived(now.mono);
        self.complete(now);
        Ok(freed)
    }

    fn keypair(&self, derived: &Derived, initiator: bool, now: Instant) -> Box<Keypair> {
        Box::new(Keypair {
            seal: Arc::new(SealKey::new(&derived.send, derived.remote, self.trains, now)),
            open: OpenKey::new(&derived.receive, derived.local, self.trains, now),
            initiator,
            sending: true,
        })
    }

    fn complete(&mut self, now: Now) {
        //@ C-SES-9
        self.timers.completed();
        self.stats.last_handshake = Some(now.unix);
    }

    /// Takes the cookie out of a reply to our last handshake message. Not an authenticated packet: it moves
    /// no endpoint and no timer (C-CK-3).
    pub(crate) fn accept_cookie(&mut self, reply: &[u8; COOKIE_REPLY], now: Instant) -> Result<(), Discard> {
        self.signer.consume(reply, now)
    }

    /// Any authenticated packet came from `from`. Gives whether the peer moved.
    pub(crate) fn heard(&mut self, from: Option<Endpoint>, now: Instant) -> bool {
        //@ C-IN-1
        let moved = from.is_some() && self.endpoint != from;
        let roamed = moved && self.remote() != from.map(|f| f.remote);
        if moved {
            self.endpoint = from;
        }
        self.timers.received(now);
        roamed
    }

    fn remote(&self) -> Option<SocketAddr> {
        self.endpoint.map(|e| e.remote)
    }

    // -- data -----------------------------------------------------------------------------------------

    /// The key to send with, when it is fit for it (C-SES-5).
    pub(crate) fn seal_key(&self, now: Instant) -> Option<&Arc<SealKey>> {
        //@ C-SES-5
        self.keypairs
            .current
            .as_ref()
            .filter(|k| k.sending && !k.seal.reached(REJECT_AFTER_TIME, now))
            .map(|k| &k.seal)
    }

    /// The key of the current session, fit for sending or not.
    pub(crate) fn session(&self) -> Option<&SealKey> {
        self.keypairs.current.as_ref().map(|pair| &*pair.seal)
    }

    /// `data` and/or keepalive datagrams went out. Gives whether the session wants to be renewed (C-TMR-7).
    pub(crate) fn sent(&mut self, now: Instant, bytes: usize, data: bool) -> bool {
        //@ C-OUT-6
        self.stats.tx_bytes += bytes as u64;
        self.timers.sent(now);
        if data {
            self.timers.data_sent(now);
        }
        self.wants_renewal(now)
    }

    #[cfg_attr(not(feature = "io"), allow(dead_code, reason = "there are no others"))]
    /// As [`Peer::sent`], for what others sent up to `at`; `bytes` may be negative.
    pub(crate) fn carried(&mut self, at: Instant, bytes: i64, now: Instant) -> bool {
        self.stats.tx_bytes = self.stats.tx_bytes.saturating_add_signed(bytes);
        self.timers.carried(at);
        self.wants_renewal(now)
    }

    fn wants_renewal(&self, now: Instant) -> bool {
        //@ C-TMR-7
        //@ C-TMR-9
        self.keypairs.current.as_ref().is_some_and(|k| {
            k.sending
                && (k.seal.sent() > REKEY_AFTER_MESSAGES
                    || (k.initiator && k.seal.reached(REKEY_AFTER_TIME, now)))
        })
    }

    /// Decrypts what may be new of a train of the session `index`: see [`OpenKey::open_ahead`].
    pub(crate) fn open_ahead(&self, index: u32, bytes: &mut [u8], jobs: &[Job], now: Instant) -> (u64, u64) {
        self.opener(index).map_or((0, 0), |open| open.open_ahead(bytes, jobs, now))
    }

    /// Opens the `body` (what comes after the header) of one data datagram in place, unless it was opened ahead, and does all that an
    /// authenticated packet does, in the kernel's order (C-TMR-11), up to the inner checks. Nothing but the bytes of `body` changes on failure.
    pub(crate) fn open(
        &mut self,
        header: DataHeader,
        body: &mut [u8],
        ahead: Option<bool>,
        from: Option<Endpoint>,
        now: Now,
    ) -> Result<Opened, Discard> {
        //@ C-SES-3
        let Keypairs { previous, current, next } = &mut self.keypairs;
        let is = |k: &Option<Box<Keypair>>| k.as_ref().is_some_and(|k| k.open.local() == header.receiver);
        let unconfirmed = is(next);
        let slot = if is(current) {
            current
        } else if unconfirmed {
            next
        } else {
            previous
        };
        let Some(keypair) = slot.as_mut().filter(|k| k.open.local() == header.receiver) else {
            return Err(Discard::UnknownIndex);
        };
        let len = keypair.open.open(header, body, ahead, now.mono)?;
        //@ C-TMR-11
        let mut opened = Opened { len, ..Opened::default() };
        if unconfirmed {
            let keypairs = &mut self.keypairs;
            opened.freed = index_of(core::mem::replace(&mut keypairs.previous, keypairs.current.take()));
            keypairs.current = keypairs.next.take();
            opened.confirmed = true;
            self.complete(now);
        }
        //@ C-TMR-8
        let aging = self.keypairs.current.as_ref().is_some_and(|k| {
            k.initiator
                && k.sending
                && k.seal.reached(REJECT_AFTER_TIME - KEEPALIVE_TIMEOUT - REKEY_TIMEOUT, now.mono)
        });
        opened.rekey = aging && self.timers.take_last_minute();
        opened.roamed = self.heard(from, now.mono);
        if len == 0 {
            //@ C-IN-2
            self.stats.rx_bytes += DATA_OVERHEAD as u64;
        } else {
            self.timers.data_received(now.mono);
        }
        Ok(opened)
    }

    #[cfg(test)]
    pub(crate) fn set_sent(&self, counter: u64) {
        if let Some(k) = &self.keypairs.current {
            k.seal.set_sent(counter);
        }
    }
}
