//! One test is one sentence of the paper, on a virtual clock, through the public `Device`.

#![allow(missing_docs, unreachable_pub, dead_code, clippy::unwrap_used)]

mod cookies;
mod formats;
mod handshake;
mod harness;
mod indices;
mod replay;
mod sessions;
mod smoke;
mod timers;
