//! The paper's constants and the five timers of a peer, as stamps and deadlines (whitepaper 6).
//!
//! The packet path only writes stamps. Who owns a peer asks for the earliest deadline and calls
//! [`Timers::expire`] when it passed.

use core::time::Duration;

use crate::time::Instant;

pub(crate) const REKEY_AFTER_MESSAGES: u64 = 1 << 60;
/// No packet is sent or accepted with this counter or a greater one (whitepaper 6.1).
pub(crate) const REJECT_AFTER_MESSAGES: u64 = u64::MAX - (1 << 13);
pub(crate) const REKEY_AFTER_TIME: Duration = Duration::from_secs(120);
pub(crate) const REJECT_AFTER_TIME: Duration = Duration::from_secs(180);
pub(crate) const REKEY_TIMEOUT: Duration = Duration::from_secs(5);
pub(crate) const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);
pub(crate) const WIPE_AFTER: Duration = Duration::from_secs(540);
/// Initiations after the first and the second that stay unanswered before we give up: 20 in all.
pub(crate) const MAX_TIMER_HANDSHAKES: u32 = 18;
/// Retransmissions are spread by up to this much, so that two peers do not collide for ever.
pub(crate) const MAX_JITTER: Duration = Duration::from_millis(333);
/// At most one initiation of a peer is consumed in this time.
pub(crate) const INITIATION_INTERVAL: Duration = Duration::from_millis(20);

/// How long waiting packets rest when the outbox had no room for them.
const FLUSH_RETRY: Duration = Duration::from_millis(1);

/// What a deadline asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// Send a new initiation: nobody answered the last one.
    Retransmit,
    /// Send an initiation: data stayed without any answer.
    NewHandshake,
    /// Stop trying; drop what waits.
    GiveUp,
    /// Send an empty packet: we received data and sent nothing back.
    Keepalive,
    /// Send an empty packet: the interval the user set has passed.
    PersistentKeepalive,
    /// Forget all session keys.
    Wipe,
    /// Send waiting packets that found no room before.
    Flush,
}

const OFF: Instant = Instant::MAX;

/// The timers of one peer. [`Instant::MAX`] means not armed.
#[derive(Debug)]
pub(crate) struct Timers {
    retransmit: Instant,
    new_handshake: Instant,
    keepalive: Instant,
    persistent: Instant,
    wipe: Instant,
    flush: Instant,
    another_keepalive: bool,
    /// The keepalive that is due is to be followed by another one.
    keepalive_again: bool,
    /// Rekey on receive was already asked for in this session (C-TMR-8).
    last_minute: bool,
    attempts: u32,
    interval: u16,
    last_initiation: Option<Instant>,
    /// The peer's initiation overtook our own.
    crossed: bool,
    /// When an authenticated packet was received last.
    heard: Instant,
    jitter: u64,
}

impl Timers {
    /// `seed` decorrelates the jitter of peers.
    pub(crate) const fn new(seed: u64) -> Self {
        Self {
            retransmit: OFF,
            new_handshake: OFF,
            keepalive: OFF,
            persistent: OFF,
            wipe: OFF,
            flush: OFF,
            another_keepalive: false,
            keepalive_again: false,
            last_minute: false,
            attempts: 0,
            interval: 0,
            last_initiation: None,
            crossed: false,
            heard: Instant::ZERO,
            jitter: seed | 1,
        }
    }

    /// Uniform in 0..333 ms; xorshift64 is random enough to break ties.
    fn jitter(&mut self) -> Duration {
        //@ C-HS-7
        self.jitter ^= self.jitter << 13;
        self.jitter ^= self.jitter >> 7;
        self.jitter ^= self.jitter << 17;
        Duration::from_micros((self.jitter >> 32) % (MAX_JITTER.as_micros() as u64))
    }

    /// The earliest deadline; [`Instant::MAX`] when nothing is armed.
    pub(crate) fn next(&self) -> Instant {
        self.retransmit
            .min(self.new_handshake)
            .min(self.keepalive)
            .min(self.persistent)
            .min(self.wipe)
            .min(self.flush)
    }

    /// Takes one deadline that has passed; call again until `None`. Each call disarms what it gives.
    pub(crate) fn expire(&mut self, now: Instant) -> Option<Due> {
        let due = |at: &mut Instant| {
            let passed = *at <= now;
            if passed {
                *at = OFF;
            }
            passed
        };
        if due(&mut self.wipe) {
            return Some(Due::Wipe);
        }
        if due(&mut self.retransmit) {
            //@ C-TMR-1
            if self.attempts > MAX_TIMER_HANDSHAKES {
                self.keepalive = OFF;
                if self.wipe == OFF {
                    self.wipe = now.after(WIPE_AFTER);
                }
                return Some(Due::GiveUp);
            }
            self.attempts += 1;
            return Some(Due::Retransmit);
        }
        if due(&mut self.new_handshake) {
            return Some(Due::NewHandshake);
        }
        if due(&mut self.keepalive) {
            //@ C-TMR-5
            self.keepalive_again = core::mem::take(&mut self.another_keepalive);
            return Some(Due::Keepalive);
        }
        if due(&mut self.persistent) {
            return Some(Due::PersistentKeepalive);
        }
        due(&mut self.flush).then_some(Due::Flush)
    }

    /// May an initiation go now? A `fresh` reason restarts the count of attempts, allowed or not (C-TMR-2).
    pub(crate) fn may_initiate(&mut self, now: Instant, fresh: bool) -> bool {
        //@ C-TMR-2
        if fresh {
            self.attempts = 0;
        }
        //@ C-TMR-3
        let wait = match self.last_initiation {
            Some(last) => last.after(REKEY_TIMEOUT),
            None => return true,
        };
        if wait <= now {
            return true;
        }
        if !fresh {
            // A response was sent meanwhile, to a call that crossed ours: again when its 5 s, spread already, are over.
            self.attempts = self.attempts.saturating_sub(1);
            self.retransmit = wait;
        }
        false
    }

    /// An initiation was sent.
    pub(crate) fn initiated(&mut self, now: Instant) {
        self.last_initiation = Some(now);
        self.retransmit = now.after(REKEY_TIMEOUT).after(self.jitter());
        self.sent(now);
    }

    /// The initiation that is about to be answered ended one of ours.
    pub(crate) const fn crossed(&mut self) {
        self.crossed = true;
    }

    /// A response was sent, and with it a session derived.
    pub(crate) fn responded(&mut self, now: Instant) {
        //@ C-HS-7
        // When both ends called at once, both answer and neither may send. Under steady traffic both would call
        // again after exactly 5 s, and so on for ever: the kernel spreads retransmissions only.
        let spread = if core::mem::take(&mut self.crossed) { self.jitter() } else { Duration::ZERO };
        self.last_initiation = Some(now.after(spread));
        self.derived(now);
        self.sent(now);
    }

    /// A session was derived (C-SES-7).
    pub(crate) fn derived(&mut self, now: Instant) {
        //@ C-TMR-10
        self.wipe = now.after(WIPE_AFTER);
    }

    /// The session is confirmed in both directions.
    pub(crate) const fn completed(&mut self) {
        self.retransmit = OFF;
        self.attempts = 0;
        self.last_minute = false;
    }

    /// Any authenticated packet was sent.
    pub(crate) fn sent(&mut self, now: Instant) {
        // As in the kernel, a wish for another keepalive outlives what is sent meanwhile.
        self.keepalive = OFF;
        self.traversed(now);
    }

    /// A non-empty data packet was sent.
    pub(crate) fn data_sent(&mut self, now: Instant) {
        //@ C-TMR-4
        if self.new_handshake == OFF {
            self.new_handshake = now.after(KEEPALIVE_TIMEOUT).after(REKEY_TIMEOUT).after(self.jitter());
        }
    }

    #[cfg_attr(not(feature = "io"), allow(dead_code, reason = "there are no others"))]
    /// Data packets were sent by others, up to `at`: told late, so what happened since goes before.
    pub(crate) fn carried(&mut self, at: Instant) {
        //@ C-TMR-5
        if at.after(KEEPALIVE_TIMEOUT) >= self.keepalive {
            self.keepalive = OFF;
        }
        //@ C-TMR-4
        if at > self.heard {
            self.data_sent(at);
        }
        //@ C-TMR-6
        if self.interval != 0 {
            let next = at.after(Duration::from_secs(self.interval.into()));
            self.persistent = if self.persistent == OFF { next } else { self.persistent.max(next) };
        }
    }

    /// Any authenticated packet was received.
    pub(crate) fn received(&mut self, now: Instant) {
        self.heard = now;
        self.new_handshake = OFF;
        self.traversed(now);
    }

    /// A non-empty data packet was received.
    pub(crate) fn data_received(&mut self, now: Instant) {
        //@ C-TMR-5
        if self.keepalive == OFF {
            self.keepalive = now.after(KEEPALIVE_TIMEOUT);
        } else {
            self.another_keepalive = true;
        }
    }

    fn traversed(&mut self, now: Instant) {
        //@ C-TMR-6
        if self.interval != 0 {
            self.persistent = now.after(Duration::from_secs(self.interval.into()));
        }
    }

    /// A keepalive was sent or tried. Arms the next one where sending it did not.
    pub(crate) fn kept_alive(&mut self, now: Instant) {
        //@ C-TMR-5
        if core::mem::take(&mut self.keepalive_again) {
            self.keepalive = now.after(KEEPALIVE_TIMEOUT);
        }
        if self.interval != 0 && self.persistent == OFF {
            self.traversed(now);
        }
    }

    /// Makes a persistent keepalive due now, if they are on: the interface came up or they were turned on.
    pub(crate) const fn persist_now(&mut self, now: Instant) {
        if self.interval != 0 {
            self.persistent = now;
        }
    }

    /// Seconds between persistent keepalives, 0 = off.
    pub(crate) const fn interval(&self) -> u16 {
        self.interval
    }

    /// Sets the interval; gives whether it was turned on.
    pub(crate) fn set_interval(&mut self, seconds: u16, now: Instant) -> bool {
        let turned_on = self.interval == 0 && seconds != 0;
        // Setting the same again must not put off the next one.
        if self.interval != seconds {
            self.interval = seconds;
            self.persistent = OFF;
            self.traversed(now);
        }
        turned_on
    }

    /// Asks once per session whether to rekey on receive (C-TMR-8).
    pub(crate) const fn take_last_minute(&mut self) -> bool {
        let first = !self.last_minute;
        self.last_minute = true;
        first
    }

    /// Packets found no room; try again shortly. Not at once, or a full outbox would keep us due for ever.
    pub(crate) fn flush_soon(&mut self, now: Instant) {
        self.flush = now.after(FLUSH_RETRY);
    }

    /// Lets a new initiation go at once (C-HS-10).
    pub(crate) const fn forget_last_initiation(&mut self) {
        self.last_initiation = None;
    }

    /// Interface down: nothing is armed any more (C-TMR-12).
    pub(crate) fn stop(&mut self) {
        //@ C-TMR-12
        *self = Self { interval: self.interval, ..Self::new(self.jitter) };
    }
}
