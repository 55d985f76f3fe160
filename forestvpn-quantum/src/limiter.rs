//! Token buckets for handshakes, one per source; asked by the device under load, after mac2 proved that the
//! source address is real (C-LOAD-2).

use core::hash::{BuildHasher, Hasher};
use core::net::IpAddr;
use core::time::Duration;
use std::collections::HashMap;
use std::hash::DefaultHasher;

use crate::time::Instant;

/// Twenty handshakes per second…
const COST_NS: u64 = 50_000_000;
/// …after a burst of five.
const FULL_NS: u64 = 5 * COST_NS;
/// Most sources remembered at a time.
pub(crate) const CAPACITY: usize = 65_536;
/// How often idle sources are forgotten. Their buckets are full long before, so nothing is lost.
const COLLECT: Duration = Duration::from_secs(1);

/// Who pays: an IPv4 address, or the /64 that an IPv6 host can choose its addresses from.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Source {
    V4(u32),
    V6(u64),
}

#[derive(Clone, Copy)]
struct Bucket {
    tokens_ns: u64,
    at: Instant,
}

/// SipHash with a secret seed, so that nobody can choose addresses that collide (C-IDX-5).
#[derive(Clone)]
struct Seed([u8; 16]);

impl BuildHasher for Seed {
    type Hasher = DefaultHasher;

    fn build_hasher(&self) -> DefaultHasher {
        let mut hasher = DefaultHasher::new();
        hasher.write(&self.0);
        hasher
    }
}

type Table = HashMap<Source, Bucket, Seed>;

/// Buckets in two generations: a source that is heard moves to the young one; once a second the old one,
/// whose sources were all silent for a second, is dropped whole and the young one takes its place. So
/// forgetting costs the same for one source as for 65 536, and the memory goes back.
pub(crate) struct Limiter {
    young: Table,
    old: Table,
    turned: Instant,
}

impl Limiter {
    /// An empty limiter; it takes no memory until it is used. `seed` must be unpredictable.
    pub(crate) fn new(seed: [u8; 16]) -> Self {
        let empty = || HashMap::with_hasher(Seed(seed));
        Self { young: empty(), old: empty(), turned: Instant::ZERO }
    }

    /// Takes one handshake from the bucket of `ip`. `false`: the bucket is empty, or too many sources are
    /// remembered to take on one more.
    pub(crate) fn allow(&mut self, ip: IpAddr, now: Instant) -> bool {
        //@ C-LOAD-2
        self.collect(now);
        let source = match ip.to_canonical() {
            IpAddr::V4(ip) => Source::V4(ip.to_bits()),
            IpAddr::V6(ip) => Source::V6((ip.to_bits() >> 64) as u64),
        };
        if let Some(bucket) = self.young.get_mut(&source) {
            return bucket.take(now);
        }
        let mut bucket = match self.old.remove(&source) {
            Some(bucket) => bucket,
            None if self.len() < CAPACITY => Bucket { tokens_ns: FULL_NS, at: now },
            None => return false,
        };
        let allowed = bucket.take(now);
        if self.young.capacity() == 0 {
            // All at once: growing step by step would move tens of thousands of entries in one call.
            self.young.reserve(CAPACITY);
        }
        self.young.insert(source, bucket);
        allowed
    }

    /// Forgets sources that were silent for a second and gives their memory back. [`allow`](Self::allow)
    /// does this by itself; call it when the load is over.
    pub(crate) fn collect(&mut self, now: Instant) {
        let age = now.since(self.turned);
        if age < COLLECT {
            return;
        }
        self.turned = now;
        let empty = HashMap::with_hasher(self.young.hasher().clone());
        self.old = core::mem::replace(&mut self.young, empty);
        if age >= COLLECT * 2 {
            // Nobody was heard since the young generation grew too old as well.
            self.old = HashMap::with_hasher(self.young.hasher().clone());
        }
    }

    /// Sources remembered.
    pub(crate) fn len(&self) -> usize {
        self.young.len().saturating_add(self.old.len())
    }

    /// When [`collect`](Self::collect) has something to do; `None` when nothing is remembered.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        (self.len() > 0).then(|| self.turned.after(COLLECT))
    }
}

impl Bucket {
    /// Fills the bucket up to `now`, then takes the price of one handshake if it is there.
    fn take(&mut self, now: Instant) -> bool {
        let earned = now.as_nanos().saturating_sub(self.at.as_nanos());
        let tokens = self.tokens_ns.saturating_add(earned).min(FULL_NS);
        self.at = self.at.max(now);
        let left = tokens.checked_sub(COST_NS);
        self.tokens_ns = left.unwrap_or(tokens);
        left.is_some()
    }
}

#[cfg(test)]
#[path = "../tests/unit/limiter.rs"]
mod tests;
