//! ChaCha20-Poly1305 (RFC 8439, no additional data) for several packets of one key at once, on x86-64 with AVX-512
//! (F, BW, IFMA).
//!
//! One packet alone uses such registers badly: its 64-byte blocks of ChaCha20 seldom fill them, and its Poly1305 is a
//! chain. Packets do not depend on each other, so they take the lanes:
//!
//! ```text
//! ChaCha20: 16 lanes, a block each, of whichever packets; K = block 0, the Poly1305 key, t = block of text
//!     packet 0: K t t t t | packet 1: K t t t t | packet 2: K t t t t
//!     lanes     0 1 2 3 4 |           5 6 7 8 9 |      10 ...... 14 ...
//!
//! Poly1305: 8 lanes, a packet each, four blocks of 16 bytes in a step; c = of ciphertext, L = of lengths. A zero in
//! front changes nothing as long as nothing was added before it, so packets of any lengths end together:
//!     packet 0: . . . c  c c c c  c c c L
//!     packet 1: c c c c  c c c c  c c c L
//!     packet 2: . . . .  . . c c  c c c L
//!     step            0        1        2
//! ```
//!
//! Only lengths, addresses, counters and the verdict about a packet decide where the code goes and what memory it
//! touches; keys, text and tags never do. This file says which block goes into which lane, `lanes/avx512.rs` what is
//! done to it.
#![expect(unsafe_code, reason = "calls of code for a processor that was asked first")]
#![allow(
    clippy::indexing_slicing,
    reason = "indices of small arrays, below their lengths by the loops around them"
)]

mod avx512;

use zeroize::Zeroize;

use crate::crypto::{self, Job, MOST, TAG};

/// Bytes of a ChaCha20 block.
const BLOCK: usize = 64;
/// Blocks that ChaCha20 makes at once.
const BLOCKS: usize = 16;
/// Packets that Poly1305 takes at once.
const PACKETS: usize = 8;
/// Bytes that are encrypted before their tags are calculated: they are still in the nearest cache then.
const NEAR: usize = 24 << 10;

/// Fewer packets are faster one by one, however short.
pub(crate) const FEWEST: usize = 4;

/// How many of these jobs, from the first on, are faster in lanes than one by one: all of them, unless the last group
/// of eight is too small. A group takes about as long as its longest packet, eight times; weighed by the table in
/// docs/adr/0003-aead.md, in bytes that ring would seal meanwhile.
pub(crate) fn worth(jobs: &[Job]) -> usize {
    let (groups, rest) = jobs.as_chunks::<PACKETS>();
    let longest = rest.iter().fold(0, |longest, job| job.len.max(longest));
    let singly: usize = rest.iter().map(|job| 300 + job.len).sum();
    let together = 900 + 11 * longest / 2;
    if singly > together { jobs.len() } else { groups.len() * PACKETS }
}

/// Has this processor what it takes?
pub(crate) fn able() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512ifma")
}

/// A key for many packets at once, made only where the processor is [`able`]. To be kept where it is wiped.
pub(crate) struct Lanes {
    key: [u32; 8],
}

/// Key stream of a pass: 64 bytes for each lane.
#[repr(C, align(64))]
struct Stream([[u64; 8]; BLOCKS]);

impl Stream {
    const fn new() -> Self {
        Self([[0; 8]; BLOCKS])
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.0 = [[0; 8]; BLOCKS];
        // Stores that nobody reads would be left out otherwise.
        zeroize::optimization_barrier(&self.0);
    }
}

/// Up to sixteen blocks: what differs between their ChaCha20 states, and what each is for.
#[derive(Default)]
struct Pass {
    count: usize,
    /// A bit for each block that is a Poly1305 key.
    keys: u16,
    /// Word 12: the block's number in its packet.
    block: [u32; BLOCKS],
    /// Words 14 and 15: the packet's counter. Word 13 is zero.
    low: [u32; BLOCKS],
    high: [u32; BLOCKS],
    /// Place of the packet among the jobs.
    packet: [u32; BLOCKS],
    /// Where the block's text lies, and its length: at most 64 bytes, none if it is a key.
    at: [usize; BLOCKS],
    len: [usize; BLOCKS],
}

impl Pass {
    /// Takes lanes for the blocks of job `n` from number `from` to before `end`, as many as are free. Block 0 is the
    /// key. Gives the number of the block to go on with.
    fn take(&mut self, n: usize, job: &Job, from: usize, end: usize) -> usize {
        let count = self.count.min(BLOCKS);
        let to = (BLOCKS - count).min(end.saturating_sub(from)) + count;
        for ((i, block), number) in (count..to).zip(from..).zip(from as u32..) {
            // Of block 0 nothing is used of these two.
            let before = block.wrapping_sub(1).wrapping_mul(BLOCK);
            let len = job.len.wrapping_sub(before).min(BLOCK);
            self.block[i] = number;
            self.low[i] = job.counter as u32;
            self.high[i] = (job.counter >> 32) as u32;
            self.packet[i] = n as u32;
            self.at[i] = job.at.wrapping_add(before);
            self.len[i] = if block == 0 { 0 } else { len };
        }
        if from == 0 && to > count {
            self.keys |= 1 << count;
        }
        self.count = to;
        from + (to - count)
    }

    const fn is_full(&self) -> bool {
        self.count >= BLOCKS
    }

    const fn clear(&mut self) {
        (self.count, self.keys) = (0, 0);
    }

    /// The lanes that were taken: packet, place and length of the text, and key stream.
    fn lanes<'s>(&self, stream: &'s Stream) -> impl Iterator<Item = (usize, usize, usize, &'s [u64; 8])> {
        let lanes = self.packet.iter().zip(&self.at).zip(&self.len).zip(&stream.0).take(self.count);
        lanes.map(|(((packet, at), len), block)| (*packet as usize, *at, *len, block))
    }
}

/// ChaCha20 blocks that a packet takes: its key and its text.
const fn blocks(job: &Job) -> usize {
    1 + job.len.div_ceil(BLOCK)
}

/// One-time keys of a train, ordered for registers: word w of packet n is `0[w][n]`. Words 0 and 1 are r, clamped,
/// words 2 and 3 are s.
struct Keys {
    words: [[u64; MOST]; 4],
    used: usize,
}

impl Keys {
    const fn new(used: usize) -> Self {
        Self { words: [[0; MOST]; 4], used }
    }

    /// Takes the key blocks out of a pass.
    fn take(&mut self, pass: &Pass, stream: &Stream) {
        const CLAMP: [u64; 4] = [0x0fff_fffc_0fff_ffff, 0x0fff_fffc_0fff_fffc, u64::MAX, u64::MAX];
        let mut left = pass.keys;
        while left != 0 {
            let lane = left.trailing_zeros() as usize % BLOCKS;
            left &= left - 1;
            let n = pass.packet[lane] as usize;
            for ((words, from), clamp) in self.words.iter_mut().zip(&stream.0[lane]).zip(CLAMP) {
                if let Some(word) = words.get_mut(n) {
                    *word = from & clamp;
                }
            }
        }
    }

    /// Word `w` of the eight packets from `first` on.
    fn group(&self, w: usize, first: usize) -> [u64; PACKETS] {
        let words = self.words.get(w).and_then(|words| words.get(first..)?.first_chunk());
        words.copied().unwrap_or_default()
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        for words in &mut self.words {
            words.iter_mut().take(self.used).for_each(Zeroize::zeroize);
        }
    }
}

/// What Poly1305 is to be calculated of, for eight packets.
struct Group<'b> {
    /// Text, encrypted.
    texts: [&'b [u8]; PACKETS],
    /// 16-byte blocks of each including the one of lengths; 0 for a lane without a packet.
    blocks: [usize; PACKETS],
    /// Words of r and s.
    keys: [[u64; PACKETS]; 4],
}

impl Group<'_> {
    /// Steps of four blocks that the longest packet takes.
    fn steps(&self) -> usize {
        self.blocks.iter().fold(0, |most, blocks| most.max(blocks.div_ceil(4)))
    }

    /// Blocks of zeros in front of each packet.
    fn padding(&self) -> [usize; PACKETS] {
        let all = self.steps() * 4;
        self.blocks.map(|blocks| all - blocks)
    }

    /// The last block of each packet ends with the length of the text; there is no associated data.
    fn lengths(&self) -> [u64; PACKETS] {
        self.texts.map(|text| text.len() as u64)
    }
}

impl Lanes {
    /// `None`: this processor cannot.
    pub(crate) fn new(key: &[u8; 32]) -> Option<Self> {
        let (words, _) = key.as_chunks::<4>();
        let mut own = [0; 8];
        own.iter_mut().zip(words).for_each(|(to, from)| *to = u32::from_le_bytes(*from));
        able().then_some(Self { key: own })
    }

    /// Encrypts each text in place and writes the tag behind it. `false`: nothing happened, as not all of at most
    /// [`MOST`] jobs lie within `bytes`.
    #[must_use]
    pub(crate) fn seal(&self, bytes: &mut [u8], jobs: &[Job]) -> bool {
        if !fit(jobs, bytes) {
            return false;
        }
        for jobs in jobs.chunks(near(jobs)) {
            let (mut keys, mut stream, mut pass) = (Keys::new(jobs.len()), Stream::new(), Pass::default());
            for (n, job) in jobs.iter().enumerate() {
                let mut block = pass.take(n, job, 0, blocks(job));
                while pass.is_full() {
                    self.mix(bytes, &mut pass, &mut stream, &mut keys, u64::MAX);
                    block = pass.take(n, job, block, blocks(job));
                }
            }
            self.mix(bytes, &mut pass, &mut stream, &mut keys, u64::MAX);
            for (first, group) in (0..).step_by(PACKETS).zip(jobs.chunks(PACKETS)) {
                for (job, tag) in group.iter().zip(self.tags(bytes, group, first, &keys)) {
                    if let Some(place) = bytes.get_mut(job.at + job.len..job.at + job.len + TAG) {
                        place.copy_from_slice(&tag);
                    }
                }
            }
        }
        true
    }

    /// Verifies each tag and decrypts in place what is right. Gives one bit a job, set for those; the texts of the
    /// others are left as they are. None is right unless all of at most [`MOST`] jobs lie within `bytes`.
    pub(crate) fn open(&self, bytes: &mut [u8], jobs: &[Job]) -> u64 {
        if !fit(jobs, bytes) {
            return 0;
        }
        let near = near(jobs);
        let mut good = 0;
        for (first, jobs) in (0..).step_by(near).zip(jobs.chunks(near)) {
            good |= self.open_near(bytes, jobs) << first;
        }
        good
    }

    fn open_near(&self, bytes: &mut [u8], jobs: &[Job]) -> u64 {
        let (mut keys, mut stream, mut pass) = (Keys::new(jobs.len()), Stream::new(), Pass::default());
        // The keys of all come first. Lanes of the last pass that are left begin with the text, and their key
        // stream waits for the verdict: `begun` packets are in there whole, and of the next one all before `block`.
        for (n, job) in jobs.iter().enumerate() {
            if pass.is_full() {
                self.keystream(&pass, &mut stream);
                keys.take(&pass, &stream);
                pass.clear();
            }
            pass.take(n, job, 0, 1);
        }
        let (mut begun, mut block) = (0, 1);
        while let Some(job) = jobs.get(begun)
            && !pass.is_full()
        {
            block = pass.take(begun, job, block, blocks(job));
            if block == blocks(job) {
                (begun, block) = (begun + 1, 1);
            }
        }
        self.keystream(&pass, &mut stream);
        keys.take(&pass, &stream);
        let mut good = 0;
        for (first, group) in (0..).step_by(PACKETS).zip(jobs.chunks(PACKETS)) {
            for ((i, job), tag) in (first..).zip(group).zip(self.tags(bytes, group, first, &keys)) {
                let said = bytes.get(job.at + job.len..job.at + job.len + TAG).unwrap_or_default();
                //@ C-PRIM-7
                good |= u64::from(crypto::equal(said, &tag)) << i;
            }
        }
        // SAFETY: `new` made sure that the processor has all that this is compiled for.
        unsafe { avx512::mix(bytes, &pass, &stream, good) };
        pass.clear();
        for (n, job) in jobs.iter().enumerate().skip(begun) {
            if good >> n & 1 == 1 {
                block = pass.take(n, job, block, blocks(job));
                while pass.is_full() {
                    self.mix(bytes, &mut pass, &mut stream, &mut keys, good);
                    block = pass.take(n, job, block, blocks(job));
                }
            }
            block = 1;
        }
        self.mix(bytes, &mut pass, &mut stream, &mut keys, good);
        good
    }

    /// Does a pass and empties it: keys are taken, texts of packets whose bit in `good` is set are mixed with their
    /// key stream.
    fn mix(&self, bytes: &mut [u8], pass: &mut Pass, stream: &mut Stream, keys: &mut Keys, good: u64) {
        if pass.count > 0 {
            self.keystream(pass, stream);
            keys.take(pass, stream);
            // SAFETY: `new` made sure that the processor has all that this is compiled for.
            unsafe { avx512::mix(bytes, pass, stream, good) };
            pass.clear();
        }
    }

    fn keystream(&self, pass: &Pass, stream: &mut Stream) {
        // SAFETY: `new` made sure that the processor has all that this is compiled for.
        unsafe { avx512::keystream(&self.key, pass, stream) }
    }

    /// The tags of up to eight jobs, of which the first has its key at `first`.
    fn tags(&self, bytes: &[u8], jobs: &[Job], first: usize, keys: &Keys) -> [[u8; TAG]; PACKETS] {
        let mut group = Group {
            texts: [&[]; PACKETS],
            blocks: [0; PACKETS],
            keys: core::array::from_fn(|word| keys.group(word, first)),
        };
        for ((job, text), blocks) in jobs.iter().zip(&mut group.texts).zip(&mut group.blocks) {
            *text = bytes.get(job.at..job.at + job.len).unwrap_or_default();
            *blocks = text.len().div_ceil(16) + 1;
        }
        // SAFETY: `new` made sure that the processor has all that this is compiled for.
        let [low, high] = unsafe { avx512::poly1305(&group) };
        group.keys = [[0; PACKETS]; 4];
        zeroize::optimization_barrier(&group.keys);
        let mut tags = [[0; TAG]; PACKETS];
        for ((tag, low), high) in tags.iter_mut().zip(low).zip(high) {
            *tag = (u128::from(high) << 64 | u128::from(low)).to_le_bytes();
        }
        tags
    }
}

/// How many of these jobs are worked on at a time: whole groups.
fn near(jobs: &[Job]) -> usize {
    let first = jobs.first().map_or(1, |job| job.len.max(1));
    (NEAR / first / PACKETS * PACKETS).clamp(PACKETS, MOST)
}

/// Do all jobs lie within as many bytes, and are they as many and as short as they may be?
fn fit(jobs: &[Job], bytes: &[u8]) -> bool {
    let fits = |job: &Job| {
        let end = job.at.checked_add(job.len).and_then(|end| end.checked_add(TAG));
        // A block is numbered in 32 bits.
        end.is_some_and(|end| end <= bytes.len()) && job.len <= 1 << 20
    };
    jobs.len() <= MOST && jobs.iter().all(fits)
}

#[cfg(test)]
#[path = "../tests/unit/lanes.rs"]
mod tests;
