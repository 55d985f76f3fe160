//! A userspace WireGuard-protocol tunnel core.

#![cfg_attr(not(test), warn(clippy::unwrap_used))]

pub mod batch;
pub mod config;
mod crypto;
pub mod device;
mod event;
#[cfg(all(feature = "io", target_os = "linux"))]
pub mod io;
mod key;
mod limiter;
pub mod offload;
mod replay;
mod route;
mod secret;
pub mod time;

pub use event::{Discard, Event};
pub use key::{PresharedKey, PrivateKey, PublicKey};
