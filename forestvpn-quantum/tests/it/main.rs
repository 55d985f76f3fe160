//! One test is one sentence of the paper, on a virtual clock, through the public `Device`.

#![allow(missing_docs, unreachable_pub, dead_code, clippy::unwrap_used)]

mod allowed_ips;
mod control;
mod cookies;
mod formats;
mod handshake;
mod harness;
mod inbound;
mod indices;
mod load;
mod model;
mod outbound;
mod replay;
mod sessions;
mod silence;
mod smoke;
mod staging;
mod timers;
