//! The door for users of boringtun: its paths, names and signatures (0.7) over our
//! `Peer`. One peer, no socket, no thread; the caller moves the bytes.
//!
//! This file is the only one outside `io` that reads a clock, and only for the methods that take no time
//! themselves; each has a twin ending in `_at` that is told the time. `docs/embedding.md` lists what differs
//! from upstream.

pub mod errors;
pub mod handshake;
mod inward;
mod packet;
pub mod rate_limiter;
mod timers;
mod tunn;

use core::net::{Ipv4Addr, Ipv6Addr};
use core::time::Duration;

use crate::time::{Instant, Now};

pub use errors::WireGuardError;
pub use packet::{HandshakeInit, HandshakeResponse, Packet, PacketCookieReply, PacketData};
pub use tunn::Tunn;

/// What a call on a [`Tunn`] asks its caller to do.
#[derive(Debug)]
pub enum TunnResult<'a> {
    /// Nothing.
    Done,
    /// Nothing; the call failed and changed nothing.
    Err(WireGuardError),
    /// Send this datagram to the peer.
    WriteToNetwork(&'a mut [u8]),
    /// Hand this IPv4 packet to the TUN device; its source address is given.
    WriteToTunnelV4(&'a mut [u8], Ipv4Addr),
    /// Hand this IPv6 packet to the TUN device; its source address is given.
    WriteToTunnelV6(&'a mut [u8], Ipv6Addr),
}

impl From<WireGuardError> for TunnResult<'_> {
    fn from(error: WireGuardError) -> Self {
        Self::Err(error)
    }
}

/// The first `len` bytes of `dst` for the network; 0 means nothing to do.
fn to_network(dst: &mut [u8], len: Result<usize, WireGuardError>) -> TunnResult<'_> {
    match len {
        Ok(0) => TunnResult::Done,
        Ok(len) => match dst.get_mut(..len) {
            Some(datagram) => TunnResult::WriteToNetwork(datagram),
            None => TunnResult::Err(WireGuardError::DestinationBufferTooSmall),
        },
        Err(error) => TunnResult::Err(error),
    }
}

/// The time of one call. The wall clock is read only when a handshake message needs it: for a small packet the
/// second clock would be a tenth of the whole cost.
#[derive(Clone, Copy)]
struct When {
    mono: Instant,
    unix: Option<Duration>,
    /// Read by a [`Watch`], and up to a tick old.
    late: bool,
}

impl When {
    fn read() -> Self {
        Self { mono: clock::mono(), unix: None, late: false }
    }

    fn both(self) -> Now {
        Now { mono: self.mono, unix: self.unix.unwrap_or_else(clock::unix) }
    }
}

impl From<Now> for When {
    fn from(now: Now) -> Self {
        Self { mono: now.mono, unix: Some(now.unix), late: false }
    }
}

/// The clock of one tunnel, for calls that are not told the time. For a small packet a reading is a tenth of the
/// whole cost; so data packets share one until the kernel's tick has moved on: it is 10 ms old at most, whatever
/// else the caller does or forgets. Everything else reads the clock.
#[derive(Default)]
struct Watch {
    tick: Option<Duration>,
    mono: Instant,
}

impl Watch {
    /// For a data packet.
    fn glance(&mut self) -> When {
        let tick = clock::tick();
        if tick.is_none() || tick != self.tick {
            self.mono = clock::mono();
            self.tick = tick;
        }
        When { mono: self.mono, unix: None, late: true }
    }

    /// For everything else.
    fn read(&mut self) -> When {
        let now = When::read();
        // Later glances within this tick must not go back behind it.
        self.mono = now.mono;
        now
    }

    /// A time that is good enough for a data packet, made good enough for everything else.
    fn sharpen(&mut self, now: When) -> When {
        if now.late { self.read() } else { now }
    }
}

/// CLOCK_BOOTTIME, so that keys age while the machine sleeps (C-SES-8).
#[cfg(all(feature = "io", target_os = "linux"))]
use crate::io::clock;

/// The clocks of the standard library: keys do not age while a Linux machine sleeps.
#[cfg(not(all(feature = "io", target_os = "linux")))]
#[expect(clippy::disallowed_methods, reason = "upstream's methods take no time")]
mod clock {
    use core::time::Duration;
    use std::sync::OnceLock;
    use std::time::{Instant, SystemTime, UNIX_EPOCH};

    pub(super) fn mono() -> crate::time::Instant {
        static ORIGIN: OnceLock<Instant> = OnceLock::new();
        crate::time::Instant::ZERO.after(ORIGIN.get_or_init(Instant::now).elapsed())
    }

    /// There is no cheaper clock than the one above.
    pub(super) const fn tick() -> Option<Duration> {
        None
    }

    pub(super) fn unix() -> Duration {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
    }
}

#[cfg(test)]
#[path = "../tests/unit/noise.rs"]
mod tests;
