//! A userspace WireGuard-protocol tunnel core.

#![cfg_attr(
    not(test),
    warn(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)
)]
// The core's fence (clippy.toml): a file that is its way to the outside says so with `expect`.
#![cfg_attr(not(test), warn(clippy::disallowed_methods, clippy::disallowed_types))]

// Tests in the crate run on the same virtual clock as those in tests/it.
#[cfg(test)]
extern crate self as forestvpn_quantum;
#[cfg(test)]
#[path = "../tests/it/harness.rs"]
#[allow(dead_code, unreachable_pub)]
mod harness;

#[cfg(all(feature = "io", target_os = "linux"))]
mod arena;
pub mod batch;
#[cfg(all(feature = "io", target_os = "linux"))]
mod carrier;
pub mod config;
mod cookie;
#[cfg(all(feature = "io", target_os = "linux"))]
mod crew;
mod crypto;
#[cfg(all(feature = "io", target_os = "linux"))]
mod delivery;
pub mod device;
mod event;
#[cfg(all(feature = "io", target_os = "linux"))]
mod handle;
mod handshake;
mod index;
#[cfg(all(feature = "io", target_os = "linux"))]
pub mod io;
mod ip;
mod key;
#[cfg(target_arch = "x86_64")]
mod lanes;
mod limiter;
mod mss;
pub mod noise;
pub mod offload;
mod outward;
mod peer;
mod peers;
mod replay;
#[cfg(feature = "rooms")]
#[doc(hidden)]
pub mod rooms;
mod route;
mod secret;
mod session;
mod staging;
pub mod time;
mod timers;
mod unreachable;
mod wire;
#[cfg(all(feature = "io", target_os = "linux"))]
mod worker;

/// The key types of the [`noise`] door: x25519-dalek 2, as boringtun re-exports it.
pub mod x25519 {
    pub use x25519_dalek_2::{EphemeralSecret, PublicKey, ReusableSecret, SharedSecret, StaticSecret};
}

#[cfg(all(feature = "io", target_os = "linux"))]
pub use carrier::Carrier;
pub use crypto::cipher;
pub use device::{ConfigError, Device, DeviceConfig, PeerId};
pub use event::{Discard, Event, GivenUp};
#[cfg(all(feature = "io", target_os = "linux"))]
pub use handle::{ConfigureError, Counters, Gone, Handle, Status};
pub use key::{PresharedKey, PrivateKey, PublicKey};
pub use mss::Mss;
pub use unreachable::Unreachable;
#[cfg(all(feature = "io", target_os = "linux"))]
pub use worker::{Fatal, Park, Worker};
