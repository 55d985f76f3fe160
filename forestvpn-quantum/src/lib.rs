//! A userspace WireGuard-protocol tunnel core.

#![cfg_attr(not(test), warn(clippy::unwrap_used))]

// Tests in the crate run on the same virtual clock as those in tests/it.
#[cfg(test)]
extern crate self as forestvpn_quantum;
#[cfg(test)]
#[path = "../tests/it/harness.rs"]
#[allow(dead_code, unreachable_pub)]
mod harness;

pub mod batch;
pub mod config;
mod cookie;
mod crypto;
pub mod device;
mod event;
mod handshake;
mod index;
#[cfg(all(feature = "io", target_os = "linux"))]
pub mod io;
mod ip;
mod key;
mod limiter;
pub mod offload;
mod peer;
mod peers;
mod replay;
mod route;
mod secret;
mod session;
mod staging;
pub mod time;
mod timers;
mod wire;

pub use device::{ConfigError, Device, DeviceConfig, PeerId};
pub use event::{Discard, Event};
pub use key::{PresharedKey, PrivateKey, PublicKey};
