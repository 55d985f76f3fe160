//! A session's two halves: [`SealKey`], shared and lock-free, and [`OpenKey`], owned by whoever receives.

#[cfg(feature = "io")]
use core::fmt;
use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
#[cfg(feature = "io")]
use std::sync::Arc;

#[cfg(feature = "io")]
use crate::batch::Sealing;
use crate::crypto::{Job, MOST, TAG, TrainKey};
use crate::event::Discard;
use crate::key::Secret;
use crate::replay::Window;
use crate::time::Instant;
use crate::timers::{REJECT_AFTER_MESSAGES, REJECT_AFTER_TIME};
use crate::wire::{self, DATA_HEADER, DATA_OVERHEAD, DataHeader};

/// Length of `len` plaintext bytes after padding: the next multiple of 16, but never above `mtu`.
pub(crate) const fn padded(len: usize, mtu: usize) -> usize {
    //@ C-OUT-2
    if mtu == 0 {
        return len.next_multiple_of(16);
    }
    // A packet above the MTU pads its last MTU-sized unit, as the kernel does.
    let unit = if len > mtu { len % mtu } else { len };
    let aligned = unit.next_multiple_of(16);
    let clamped = if aligned < mtu { aligned } else { mtu };
    len - unit + clamped
}

/// The sending half: shared between threads, hands out each counter once.
pub(crate) struct SealKey {
    aead: TrainKey,
    remote: u32,
    born: Instant,
    next: AtomicU64,
}

impl SealKey {
    pub(crate) fn new(key: &Secret, remote: u32, trains: bool, born: Instant) -> Self {
        Self { aead: TrainKey::new(key, trains), remote, born, next: AtomicU64::new(0) }
    }

    pub(crate) const fn age(&self, now: Instant) -> Duration {
        now.since(self.born)
    }

    /// Is the key this old?
    pub(crate) fn reached(&self, age: Duration, now: Instant) -> bool {
        // In nanoseconds: a `Duration` costs a division.
        now >= self.born.after(age)
    }

    /// Is this datagram, or the first fragment of it, one that was sealed here?
    pub(crate) fn made(&self, datagram: &[u8]) -> bool {
        datagram.len() >= DATA_HEADER
            && wire::u32_at(datagram, 0) == wire::TYPE_DATA
            && wire::u32_at(datagram, 4) == self.remote
    }

    /// How many counters were handed out.
    pub(crate) fn sent(&self) -> u64 {
        self.next.load(Ordering::Relaxed)
    }

    /// Takes `n` consecutive counters and gives the first; `None` once the key is too old or used up.
    pub(crate) fn reserve(&self, n: usize, now: Instant) -> Option<u64> {
        //@ C-SES-5
        if self.reached(REJECT_AFTER_TIME, now) {
            return None;
        }
        // Never beyond the limit, whoever else takes counters at the same time: so a counter is unique.
        let take = |next: u64| next.checked_add(n as u64).filter(|after| *after <= REJECT_AFTER_MESSAGES);
        self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).ok()
    }

    /// Seals one datagram in place: `datagram[16..len - 16]` is padded plaintext, header and tag are written
    /// around it.
    pub(crate) fn seal(&self, counter: u64, datagram: &mut [u8]) {
        let Some((header, body)) = datagram.split_first_chunk_mut::<DATA_HEADER>() else { return };
        self.head(counter, header);
        self.aead.seal(counter, body);
    }

    /// As [`SealKey::seal`], for datagrams of `stride` bytes back to back, the last of which may be shorter, under
    /// the counters from `first` on.
    pub(crate) fn seal_train(&self, first: u64, train: &mut [u8], stride: usize) {
        if train.len() <= stride {
            return self.seal(first, train);
        }
        let mut first = first;
        for train in train.chunks_mut(stride.saturating_mul(MOST).max(1)) {
            let (mut jobs, mut used) = ([Job::default(); MOST], 0);
            self.begin(first, train, 0..train.len(), stride, |next| {
                if let Some(job) = jobs.get_mut(used) {
                    *job = next;
                    used += 1;
                }
            });
            self.aead.seal_all(train, jobs.get_mut(..used).unwrap_or_default());
            first += used as u64;
        }
    }

    /// Writes the headers of the train in `bytes[at..end]`, and tells `left` what is left to do for each datagram.
    fn begin(
        &self,
        first: u64,
        bytes: &mut [u8],
        train: Range<usize>,
        stride: usize,
        mut left: impl FnMut(Job),
    ) {
        let Range { start: mut at, end } = train;
        let mut counter = first;
        while let Some(datagram) = bytes.get_mut(at..end.min(at.saturating_add(stride)))
            && let Some(len) = datagram.len().checked_sub(DATA_OVERHEAD)
            && let Some(header) = datagram.first_chunk_mut()
        {
            self.head(counter, header);
            left(Job { at: at + DATA_HEADER, len, counter });
            (at, counter) = (at + datagram.len(), counter + 1);
        }
    }

    fn head(&self, counter: u64, header: &mut [u8; DATA_HEADER]) {
        wire::put(header, 0, &wire::TYPE_DATA.to_le_bytes());
        wire::put(header, 4, &self.remote.to_le_bytes());
        wire::put(header, 8, &counter.to_le_bytes());
    }

    #[cfg(test)]
    pub(crate) fn set_sent(&self, next: u64) {
        self.next.store(next, Ordering::Relaxed);
    }
}

/// Data messages that are whole but for being sealed: those of one key, up to [`MOST`], so that a cipher that takes
/// many at once gets them from several reads.
#[cfg(feature = "io")]
pub(crate) struct Unsealed {
    key: Option<Arc<SealKey>>,
    jobs: Vec<Job>,
}

#[cfg(feature = "io")]
impl fmt::Debug for Unsealed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unsealed").field("jobs", &self.jobs.len()).finish_non_exhaustive()
    }
}

#[cfg(feature = "io")]
impl Unsealed {
    pub(crate) fn new() -> Self {
        Self { key: None, jobs: Vec::with_capacity(MOST) }
    }

    /// Takes note of the datagrams of `stride` bytes in `bytes[train]`. Those of another key, and those that would be too
    /// many with these, are sealed first.
    pub(crate) fn keep(&mut self, bytes: &mut [u8], train: Range<usize>, stride: usize, how: Sealing<'_>) {
        let Sealing { key, first } = how;
        let same = self.key.as_ref().is_none_or(|kept| Arc::ptr_eq(kept, key));
        let count = if train.len() > stride { train.len().div_ceil(stride.max(1)) } else { 1 };
        if !same || self.jobs.len() + count > MOST {
            self.seal(bytes);
        }
        if self.key.is_none() {
            self.key = Some(Arc::clone(key));
        }
        key.begin(first, bytes, train, stride, |job| self.jobs.push(job));
    }

    /// Seals all of them. The key is let go, so that it can be wiped.
    pub(crate) fn seal(&mut self, bytes: &mut [u8]) {
        if let Some(key) = self.key.take() {
            key.aead.seal_all(bytes, &mut self.jobs);
            self.jobs.clear();
        }
    }
}

/// The receiving half: one owner, keeps the replay window.
pub(crate) struct OpenKey {
    aead: TrainKey,
    local: u32,
    born: Instant,
    window: Window,
}

impl OpenKey {
    pub(crate) fn new(key: &Secret, local: u32, trains: bool, born: Instant) -> Self {
        Self { aead: TrainKey::new(key, trains), local, born, window: Window::new() }
    }

    pub(crate) const fn local(&self) -> u32 {
        self.local
    }

    /// Did `counter` fall out of the replay window? Otherwise a refused one was seen before.
    pub(crate) const fn fell_out(&self, counter: u64) -> bool {
        self.window.fell_out(counter)
    }

    /// Decrypts those of `jobs` that may be new, in place, without taking note of anything. Gives one bit a job each
    /// for what was tried and what was right: [`OpenKey::open`] is to be told, in order.
    pub(crate) fn open_ahead(&self, bytes: &mut [u8], jobs: &[Job], now: Instant) -> (u64, u64) {
        let (mut fresh, mut places, mut used) = ([Job::default(); MOST], [0; MOST], 0);
        for (i, job) in jobs.iter().enumerate().take(MOST) {
            if self.admits(job.counter, now).is_ok()
                && let (Some(to), Some(place)) = (fresh.get_mut(used), places.get_mut(used))
            {
                (*to, *place) = (*job, i);
                used += 1;
            }
        }
        let good = self.aead.open_all(bytes, fresh.get(..used).unwrap_or_default());
        let (mut tried, mut right) = (0, 0);
        for (n, place) in places.iter().enumerate().take(used) {
            tried |= 1 << place;
            right |= ((good >> n) & 1) << place;
        }
        (tried, right)
    }

    /// May a packet with this counter be new, and the key still be used?
    fn admits(&self, counter: u64, now: Instant) -> Result<(), Discard> {
        //@ C-SES-6
        //@ C-RPL-3
        if now >= self.born.after(REJECT_AFTER_TIME) || counter >= REJECT_AFTER_MESSAGES {
            return Err(Discard::KeyExpired);
        }
        if self.window.check(counter) { Ok(()) } else { Err(Discard::Replayed) }
    }

    /// Authenticates and decrypts `body`, what comes after the header, in place, then marks the counter as
    /// seen. `ahead` is what [`OpenKey::open_ahead`] said of it, if that tried it. Gives the length of the
    /// plaintext. Nothing changes on failure but the bytes of `body`.
    pub(crate) fn open(
        &mut self,
        header: DataHeader,
        body: &mut [u8],
        ahead: Option<bool>,
        now: Instant,
    ) -> Result<usize, Discard> {
        self.admits(header.counter, now)?;
        let len = match ahead {
            Some(right) => right.then(|| body.len().saturating_sub(TAG)),
            None => self.aead.open(header.counter, body),
        };
        let len = len.ok_or(Discard::BadTag)?;
        //@ C-RPL-2
        //@ C-RPL-4
        if !self.window.accept(header.counter) {
            return Err(Discard::Replayed);
        }
        Ok(len)
    }
}

/// Bytes that one data message takes for `len` bytes of IP packet.
pub(crate) const fn datagram_len(len: usize, mtu: usize) -> usize {
    padded(len, mtu) + DATA_OVERHEAD
}

/// Lets `write` put an IP packet of `len` bytes where [`SealKey::seal`] wants it, and pads it with zeros up to
/// the tag.
#[inline]
pub(crate) fn lay<R>(datagram: &mut [u8], len: usize, write: impl FnOnce(&mut [u8]) -> R) {
    let end = datagram.len().saturating_sub(TAG);
    let Some(body) = datagram.get_mut(DATA_HEADER..end) else { return };
    if let Some((packet, padding)) = body.split_at_mut_checked(len) {
        write(packet);
        // Often there is none, and a call for nothing costs as much as the header.
        if !padding.is_empty() {
            padding.fill(0);
        }
    }
}

#[cfg(test)]
#[path = "../tests/unit/session.rs"]
mod tests;
