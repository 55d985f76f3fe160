//! Time as the core sees it: a number handed in from outside, never read here.
//!
//! `std::time::Instant` stops while a Linux machine is suspended and cannot be written as a literal in a
//! test; ours is eight bytes, saturates, and is fed from CLOCK_BOOTTIME by `io::clock` (C-SES-8).

use core::time::Duration;

/// Nanoseconds since an arbitrary origin that never moves during one process life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(u64);

impl Instant {
    /// The origin itself.
    pub const ZERO: Self = Self(0);
    /// The end of time: about 584 years after the origin.
    pub const MAX: Self = Self(u64::MAX);

    /// An instant `ns` nanoseconds after the origin.
    pub const fn from_nanos(ns: u64) -> Self {
        Self(ns)
    }

    /// Nanoseconds since the origin.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Time passed since `earlier`; zero when `earlier` lies in the future, so a clock that steps back
    /// never underflows.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// This instant moved on by `by`; stops at [`Instant::MAX`].
    pub const fn after(self, by: Duration) -> Self {
        let ns = by.as_nanos();
        Self(if ns > u64::MAX as u128 { u64::MAX } else { self.0.saturating_add(ns as u64) })
    }

    /// This instant moved back by `by`; stops at [`Instant::ZERO`].
    pub const fn before(self, by: Duration) -> Self {
        let ns = by.as_nanos();
        Self(if ns > u64::MAX as u128 { 0 } else { self.0.saturating_sub(ns as u64) })
    }
}

/// Both clocks, read once per turn of the event loop.
#[derive(Clone, Copy, Debug, Default)]
pub struct Now {
    /// For ages and deadlines.
    pub mono: Instant,
    /// Wall clock since the Unix epoch; only for TAI64N timestamps and the time of the last handshake.
    pub unix: Duration,
}

/// A source of [`Now`]; implemented outside of the core (`io::clock`, or a virtual clock in tests).
pub trait Clock {
    /// Reads both clocks.
    fn now(&mut self) -> Now;
}

/// A source of random bytes; used for handshakes, indices, cookies and jitter, never per data packet.
pub trait Entropy {
    /// Fills `out` with bytes that nobody can predict.
    fn fill(&mut self, out: &mut [u8]);
}

/// The operating system's random number generator.
#[derive(Clone, Copy, Debug, Default)]
pub struct OsEntropy;

impl Entropy for OsEntropy {
    fn fill(&mut self, out: &mut [u8]) {
        #[expect(clippy::expect_used, reason = "better ended than with predictable keys")]
        // Without randomness no key may be made: the one failure that is better ended than survived.
        getrandom::fill(out).expect("the operating system gives random bytes");
    }
}
