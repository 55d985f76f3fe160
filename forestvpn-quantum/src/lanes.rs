//! ChaCha20-Poly1305 for several packets of one key at once, on x86-64 with AVX-512 (F, BW, IFMA).
//!
//! One packet alone cannot fill such registers: a block depends on the one before it in Poly1305, and a short packet
//! has too few blocks for ChaCha20. Packets do not depend on each other, so they take the lanes:
//!
//! ```text
//! ChaCha20: 16 lanes = 16 blocks of 64 bytes, of whichever packets    Poly1305: 8 lanes = 8 packets, a block each
//!   register 0  = word 0  of block a, b, c, ...                         h0, h1, h2 = limbs of 44, 44, 42 bits
//!   ...                                                                 h = (h + message block) * r mod 2^130 - 5
//!   register 15 = word 15 of block a, b, c, ...
//! ```
//!
//! Only lengths, addresses and counters decide where the code goes and what memory it touches; keys, text and tags
//! never do. The result is the same bytes as any other ChaCha20-Poly1305 (RFC 8439, no additional data).
#![expect(
    unsafe_code,
    reason = "vector loads and stores; calls of code for a processor that was asked first"
)]
#![allow(
    clippy::indexing_slicing,
    reason = "indices of small arrays, below their lengths by the loops around them"
)]

use core::arch::x86_64::{
    __m128i, __m512i, _mm_loadu_si128, _mm_setzero_si128, _mm256_storeu_si256, _mm512_add_epi32,
    _mm512_add_epi64, _mm512_and_si512, _mm512_castsi128_si512, _mm512_castsi512_si256, _mm512_inserti32x4,
    _mm512_loadu_si512, _mm512_madd52hi_epu64, _mm512_madd52lo_epu64, _mm512_mask_mov_epi64,
    _mm512_mask_storeu_epi8, _mm512_maskz_loadu_epi8, _mm512_or_si512, _mm512_rol_epi32, _mm512_set1_epi32,
    _mm512_set1_epi64, _mm512_setzero_si512, _mm512_shuffle_i32x4, _mm512_slli_epi64, _mm512_srli_epi64,
    _mm512_storeu_si512, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64, _mm512_unpacklo_epi32,
    _mm512_unpacklo_epi64, _mm512_xor_si512,
};

use subtle::ConstantTimeEq;
use zeroize::Zeroize;

use crate::crypto::{Job, MOST, TAG};

/// Blocks that ChaCha20 makes at once.
const BLOCKS: usize = 16;
/// Packets that Poly1305 takes at once.
const PACKETS: usize = 8;
/// Which packet of eight is in which lane: as loading and unpacking leaves them.
const ORDER: [usize; PACKETS] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Has this processor what it takes?
pub(crate) fn able() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512ifma")
}

/// A Poly1305 key: r before it is clamped, and s.
type OneTimeKey = [u128; 2];

/// A key for many packets at once. To be kept where it is wiped.
pub(crate) struct Lanes {
    key: [u32; 8],
}

impl Lanes {
    /// `None`: this processor cannot.
    pub(crate) fn new(key: &[u8; 32]) -> Option<Self> {
        let (words, _) = key.as_chunks::<4>();
        let mut own = [0; 8];
        own.iter_mut().zip(words).for_each(|(to, from)| *to = u32::from_le_bytes(*from));
        able().then_some(Self { key: own })
    }

    /// Encrypts each text in place and writes the tag behind it. Nothing happens unless all of at most [`MOST`] jobs
    /// lie within `bytes`.
    pub(crate) fn seal(&self, bytes: &mut [u8], jobs: &[Job]) {
        if jobs.len() <= MOST && jobs.iter().all(|job| fits(job, bytes)) {
            // SAFETY: `new` made sure that the processor has all that this is compiled for.
            unsafe { self.seal_all(bytes, jobs) }
        }
    }

    /// Verifies each tag and decrypts in place what is right. Gives one bit a job, set for those; the texts of the
    /// others are left as they are. None is right unless all of at most [`MOST`] jobs lie within `bytes`.
    pub(crate) fn open(&self, bytes: &mut [u8], jobs: &[Job]) -> u64 {
        if jobs.len() > MOST || !jobs.iter().all(|job| fits(job, bytes)) {
            return 0;
        }
        // SAFETY: as in `seal`.
        unsafe { self.open_all(bytes, jobs) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512ifma")]
    fn seal_all(&self, bytes: &mut [u8], jobs: &[Job]) {
        let mut keys = [[0; 2]; MOST];
        self.one_time_keys(jobs, &mut keys);
        self.crypt(bytes, jobs);
        for (group, keys) in jobs.chunks(PACKETS).zip(keys.chunks(PACKETS)) {
            for (job, tag) in group.iter().zip(tags(bytes, group, keys)) {
                if let Some(place) = bytes.get_mut(job.at + job.len..job.at + job.len + TAG) {
                    place.copy_from_slice(&tag);
                }
            }
        }
        keys.iter_mut().take(jobs.len()).for_each(Zeroize::zeroize);
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512ifma")]
    fn open_all(&self, bytes: &mut [u8], jobs: &[Job]) -> u64 {
        let mut keys = [[0; 2]; MOST];
        self.one_time_keys(jobs, &mut keys);
        let mut good = 0;
        let (mut right, mut count) = ([Job::default(); MOST], 0);
        for (n, (group, keys)) in jobs.chunks(PACKETS).zip(keys.chunks(PACKETS)).enumerate() {
            for (i, (job, tag)) in group.iter().zip(tags(bytes, group, keys)).enumerate() {
                let said = bytes.get(job.at + job.len..job.at + job.len + TAG).unwrap_or_default();
                if bool::from(said.ct_eq(&tag))
                    && let Some(place) = right.get_mut(count)
                {
                    *place = *job;
                    count += 1;
                    good |= 1 << (n * PACKETS + i);
                }
            }
        }
        self.crypt(bytes, right.get(..count).unwrap_or_default());
        keys.iter_mut().take(jobs.len()).for_each(Zeroize::zeroize);
        good
    }

    /// Block 0 of each packet begins with its Poly1305 key.
    #[target_feature(enable = "avx512f,avx512bw,avx512ifma")]
    fn one_time_keys(&self, jobs: &[Job], keys: &mut [OneTimeKey; MOST]) {
        for (group, keys) in jobs.chunks(BLOCKS).zip(keys.chunks_mut(BLOCKS)) {
            let mut lanes = [Lane::default(); BLOCKS];
            for (lane, job) in lanes.iter_mut().zip(group) {
                lane.counter = job.counter;
            }
            for (key, block) in keys.iter_mut().zip(&keystream(&self.key, &lanes)).take(group.len()) {
                // SAFETY: 32 bytes are written to an array of 32 bytes, the first half of the block.
                unsafe { _mm256_storeu_si256(key.as_mut_ptr().cast(), _mm512_castsi512_si256(*block)) };
            }
        }
    }

    /// Encrypts or decrypts the texts.
    #[target_feature(enable = "avx512f,avx512bw,avx512ifma")]
    fn crypt(&self, bytes: &mut [u8], jobs: &[Job]) {
        let (mut lanes, mut used) = ([Lane::default(); BLOCKS], 0);
        for job in jobs {
            for (n, at) in (0..job.len).step_by(64).enumerate() {
                if used == BLOCKS {
                    self.mix(bytes, &lanes);
                    (lanes, used) = ([Lane::default(); BLOCKS], 0);
                }
                if let Some(lane) = lanes.get_mut(used) {
                    let len = (job.len - at).min(64);
                    *lane = Lane { at: job.at + at, len, block: n as u32 + 1, counter: job.counter };
                }
                used += 1;
            }
        }
        if used > 0 {
            self.mix(bytes, &lanes);
        }
    }

    /// Mixes the keystream of 16 blocks into the bytes where they lie.
    #[target_feature(enable = "avx512f,avx512bw,avx512ifma")]
    fn mix(&self, bytes: &mut [u8], lanes: &[Lane; BLOCKS]) {
        for (lane, block) in lanes.iter().zip(&keystream(&self.key, lanes)) {
            let Some(place) = bytes.get_mut(lane.at..lane.at + lane.len) else { continue };
            let place = place.as_mut_ptr();
            if lane.len == 64 {
                // SAFETY: `place` is the start of 64 bytes that are borrowed mutably here.
                unsafe {
                    let text = _mm512_loadu_si512(place.cast());
                    _mm512_storeu_si512(place.cast(), _mm512_xor_si512(text, *block));
                }
            } else if lane.len > 0 {
                let mask = (1 << lane.len) - 1;
                // SAFETY: `place` is the start of `len` < 64 bytes that are borrowed mutably here, and the mask has
                // a bit for each of them: bytes whose bit is not set are neither read nor written.
                unsafe {
                    let text = _mm512_maskz_loadu_epi8(mask, place.cast());
                    _mm512_mask_storeu_epi8(place.cast(), mask, _mm512_xor_si512(text, *block));
                }
            }
        }
    }
}

fn fits(job: &Job, bytes: &[u8]) -> bool {
    let end = job.at.checked_add(job.len).and_then(|end| end.checked_add(TAG));
    // A block is numbered in 32 bits.
    end.is_some_and(|end| end <= bytes.len()) && job.len <= 1 << 20
}

/// A block of keystream and the bytes it is for.
#[derive(Clone, Copy, Default)]
struct Lane {
    at: usize,
    len: usize,
    block: u32,
    counter: u64,
}

macro_rules! quarter_round {
    ($x:ident, $a:literal, $b:literal, $c:literal, $d:literal) => {
        $x[$a] = _mm512_add_epi32($x[$a], $x[$b]);
        $x[$d] = _mm512_rol_epi32::<16>(_mm512_xor_si512($x[$d], $x[$a]));
        $x[$c] = _mm512_add_epi32($x[$c], $x[$d]);
        $x[$b] = _mm512_rol_epi32::<12>(_mm512_xor_si512($x[$b], $x[$c]));
        $x[$a] = _mm512_add_epi32($x[$a], $x[$b]);
        $x[$d] = _mm512_rol_epi32::<8>(_mm512_xor_si512($x[$d], $x[$a]));
        $x[$c] = _mm512_add_epi32($x[$c], $x[$d]);
        $x[$b] = _mm512_rol_epi32::<7>(_mm512_xor_si512($x[$b], $x[$c]));
    };
}

/// The 64 bytes of keystream of each lane (RFC 8439, 2.3).
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512ifma")]
fn keystream(key: &[u32; 8], lanes: &[Lane; BLOCKS]) -> [__m512i; BLOCKS] {
    let (mut block, mut low, mut high) = ([0u32; BLOCKS], [0u32; BLOCKS], [0u32; BLOCKS]);
    for (i, lane) in lanes.iter().enumerate() {
        block[i] = lane.block;
        low[i] = lane.counter as u32;
        high[i] = (lane.counter >> 32) as u32;
    }
    let all = |word: u32| _mm512_set1_epi32(word.cast_signed());
    // SAFETY: each reads 64 bytes of an array of 64 bytes.
    let each = |words: &[u32; BLOCKS]| unsafe { _mm512_loadu_si512(words.as_ptr().cast()) };
    let start = [
        all(0x6170_7865),
        all(0x3320_646e),
        all(0x7962_2d32),
        all(0x6b20_6574),
        all(key[0]),
        all(key[1]),
        all(key[2]),
        all(key[3]),
        all(key[4]),
        all(key[5]),
        all(key[6]),
        all(key[7]),
        each(&block),
        _mm512_setzero_si512(),
        each(&low),
        each(&high),
    ];
    let mut x = start;
    for _ in 0..10 {
        quarter_round!(x, 0, 4, 8, 12);
        quarter_round!(x, 1, 5, 9, 13);
        quarter_round!(x, 2, 6, 10, 14);
        quarter_round!(x, 3, 7, 11, 15);
        quarter_round!(x, 0, 5, 10, 15);
        quarter_round!(x, 1, 6, 11, 12);
        quarter_round!(x, 2, 7, 8, 13);
        quarter_round!(x, 3, 4, 9, 14);
    }
    for (word, first) in x.iter_mut().zip(start) {
        *word = _mm512_add_epi32(*word, first);
    }
    transpose(&x)
}

/// Word `i` of every lane becomes lane `i`'s words: first within quarters of a register, then the quarters.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512ifma")]
fn transpose(x: &[__m512i; 16]) -> [__m512i; 16] {
    let mut y = [_mm512_setzero_si512(); 16];
    for (y, x) in y.as_chunks_mut::<4>().0.iter_mut().zip(x.as_chunks::<4>().0) {
        let (ab, cd) = (_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpacklo_epi32(x[2], x[3]));
        let (ab_high, cd_high) = (_mm512_unpackhi_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[2], x[3]));
        *y = [
            _mm512_unpacklo_epi64(ab, cd),
            _mm512_unpackhi_epi64(ab, cd),
            _mm512_unpacklo_epi64(ab_high, cd_high),
            _mm512_unpackhi_epi64(ab_high, cd_high),
        ];
    }
    let mut out = y;
    for r in 0..4 {
        let (a, b, c, d) = (y[r], y[4 + r], y[8 + r], y[12 + r]);
        let (ab, cd) = (_mm512_shuffle_i32x4::<0x44>(a, b), _mm512_shuffle_i32x4::<0x44>(c, d));
        let (ab_high, cd_high) = (_mm512_shuffle_i32x4::<0xee>(a, b), _mm512_shuffle_i32x4::<0xee>(c, d));
        out[r] = _mm512_shuffle_i32x4::<0x88>(ab, cd);
        out[4 + r] = _mm512_shuffle_i32x4::<0xdd>(ab, cd);
        out[8 + r] = _mm512_shuffle_i32x4::<0x88>(ab_high, cd_high);
        out[12 + r] = _mm512_shuffle_i32x4::<0xdd>(ab_high, cd_high);
    }
    out
}

const MASK44: u64 = (1 << 44) - 1;
const MASK42: u64 = (1 << 42) - 1;

/// The Poly1305 tags of up to eight ciphertexts. A lane without a packet repeats the first one under a zero key.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512ifma")]
fn tags(bytes: &[u8], group: &[Job], keys: &[OneTimeKey]) -> [[u8; TAG]; PACKETS] {
    let mut out = [[0; TAG]; PACKETS];
    let Some(first) = group.first() else { return out };
    // What does not lie in the text as a whole block: its padded end, then the lengths.
    let mut ends = [[0u8; 32]; PACKETS];
    let (mut text, mut full, mut total) = ([first.at; PACKETS], [0; PACKETS], [0; PACKETS]);
    let (mut r, mut s) = ([[0u64; PACKETS]; 3], [0u128; PACKETS]);
    for (n, (job, key)) in group.iter().zip(keys).enumerate() {
        (text[n], full[n]) = (job.at, job.len / 16);
        let rest = bytes.get(job.at + full[n] * 16..job.at + job.len).unwrap_or_default();
        let padded = rest.len().next_multiple_of(16);
        total[n] = full[n] + padded / 16 + 1;
        ends[n][..rest.len()].copy_from_slice(rest);
        ends[n][padded + 8..padded + 16].copy_from_slice(&(job.len as u64).to_le_bytes());
        // Clamped as RFC 8439, 2.5 has it. This processor's numbers are little-endian, as the key is.
        let clamped = key[0] & 0x0fff_fffc_0fff_fffc_0fff_fffc_0fff_ffff;
        r[0][n] = clamped as u64 & MASK44;
        r[1][n] = (clamped >> 44) as u64 & MASK44;
        r[2][n] = (clamped >> 88) as u64;
        s[n] = key[1];
    }

    let r = [in_order(&r[0]), in_order(&r[1]), in_order(&r[2])];
    let r20 = [twenty(r[1]), twenty(r[2])];
    let mut h = [_mm512_setzero_si512(); 3];

    let whole = group.iter().map(|job| job.len / 16).min().unwrap_or(0);
    let base = bytes.as_ptr();
    for i in 0..whole {
        // SAFETY: block `i` lies within the text of every packet of the group, lanes without one point to the first
        // packet's, and all texts lie within `bytes`.
        let block = |n: usize| unsafe { _mm_loadu_si128(base.add(text[n] + 16 * i).cast()) };
        let blocks = [block(0), block(1), block(2), block(3), block(4), block(5), block(6), block(7)];
        h = absorb(h, load(blocks), r, r20);
    }
    let most = total.iter().copied().max().unwrap_or(0);
    for i in whole..most {
        let mut blocks = [_mm_setzero_si128(); PACKETS];
        let mut live = 0;
        for (k, n) in ORDER.into_iter().enumerate() {
            let block: &[u8] = if i < full[n] {
                bytes.get(text[n] + 16 * i..text[n] + 16 * i + 16).unwrap_or(&[0; 16])
            } else {
                let at = (i - full[n]) * 16;
                ends[n].get(at..at + 16).unwrap_or(&[0; 16])
            };
            // SAFETY: both are slices of 16 bytes.
            blocks[n] = unsafe { _mm_loadu_si128(block.as_ptr().cast()) };
            live |= u8::from(i < total[n]) << k;
        }
        let next = absorb(h, load(blocks), r, r20);
        for (limb, next) in h.iter_mut().zip(next) {
            *limb = _mm512_mask_mov_epi64(*limb, live, next);
        }
    }

    let mut limbs = [[0u64; PACKETS]; 3];
    for (to, from) in limbs.iter_mut().zip(h) {
        // SAFETY: 64 bytes are written to an array of 64 bytes.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), from) };
    }
    for (k, n) in ORDER.into_iter().enumerate() {
        out[n] = finish([limbs[0][k], limbs[1][k], limbs[2][k]], s[n]).to_le_bytes();
    }
    out
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512ifma")]
fn in_order(limbs: &[u64; PACKETS]) -> __m512i {
    let mut lanes = [0; PACKETS];
    for (lane, n) in lanes.iter_mut().zip(ORDER) {
        *lane = limbs[n];
    }
    // SAFETY: reads 64 bytes of an array of 64 bytes.
    unsafe { _mm512_loadu_si512(lanes.as_ptr().cast()) }
}

/// 2^132 = 20 modulo 2^130 - 5: a product that lies three limbs up comes back twenty times.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512ifma")]
fn twenty(limb: __m512i) -> __m512i {
    _mm512_add_epi64(_mm512_slli_epi64::<4>(limb), _mm512_slli_epi64::<2>(limb))
}

/// A block of each packet as limbs, with the bit that stands for its length of 16 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512ifma")]
fn load(blocks: [__m128i; PACKETS]) -> [__m512i; 3] {
    let [a, b, c, d, e, f, g, h] = blocks;
    let first = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(a), b);
    let first = _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(first, c), d);
    let second = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(e), f);
    let second = _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(second, g), h);
    // Here the lanes come into the order that ORDER tells.
    let (low, high) = (_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
    let mask = _mm512_set1_epi64(MASK44.cast_signed());
    let middle = _mm512_or_si512(_mm512_srli_epi64::<44>(low), _mm512_slli_epi64::<20>(high));
    let bit = _mm512_set1_epi64(1 << 40);
    [
        _mm512_and_si512(low, mask),
        _mm512_and_si512(middle, mask),
        _mm512_or_si512(_mm512_srli_epi64::<24>(high), bit),
    ]
}

/// h = (h + m) * r modulo 2^130 - 5, carried so far that every limb stays below 2^45.
///
/// Limbs of h + m are below 2^46, those of r below 2^44 and twenty times that below 2^49: the multiplier takes 52
/// bits. Three low halves sum up to less than 2^54, three high halves to less than 2^45.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512ifma")]
fn absorb(h: [__m512i; 3], m: [__m512i; 3], r: [__m512i; 3], r20: [__m512i; 2]) -> [__m512i; 3] {
    let h = [_mm512_add_epi64(h[0], m[0]), _mm512_add_epi64(h[1], m[1]), _mm512_add_epi64(h[2], m[2])];
    let zero = _mm512_setzero_si512();
    let product = |a: __m512i, b: __m512i, c: __m512i| {
        let low = _mm512_madd52lo_epu64(
            _mm512_madd52lo_epu64(_mm512_madd52lo_epu64(zero, h[0], a), h[1], b),
            h[2],
            c,
        );
        let high = _mm512_madd52hi_epu64(
            _mm512_madd52hi_epu64(_mm512_madd52hi_epu64(zero, h[0], a), h[1], b),
            h[2],
            c,
        );
        (low, high)
    };
    let (low0, high0) = product(r[0], r20[1], r20[0]);
    let (low1, high1) = product(r[1], r[0], r20[1]);
    let (low2, high2) = product(r[2], r[1], r[0]);
    let (mask44, mask42) = (_mm512_set1_epi64(MASK44.cast_signed()), _mm512_set1_epi64(MASK42.cast_signed()));
    // A high half counts 2^52, that is 2^8 of the next limb; of the last limb, which has 42 bits, 2^10.
    let carry = _mm512_add_epi64(_mm512_srli_epi64::<44>(low0), _mm512_slli_epi64::<8>(high0));
    let low1 = _mm512_add_epi64(low1, carry);
    let carry = _mm512_add_epi64(_mm512_srli_epi64::<44>(low1), _mm512_slli_epi64::<8>(high1));
    let low2 = _mm512_add_epi64(low2, carry);
    let carry = _mm512_add_epi64(_mm512_srli_epi64::<42>(low2), _mm512_slli_epi64::<10>(high2));
    let five = _mm512_add_epi64(carry, _mm512_slli_epi64::<2>(carry));
    let h0 = _mm512_add_epi64(_mm512_and_si512(low0, mask44), five);
    [
        _mm512_and_si512(h0, mask44),
        _mm512_add_epi64(_mm512_and_si512(low1, mask44), _mm512_srli_epi64::<44>(h0)),
        _mm512_and_si512(low2, mask42),
    ]
}

/// (h mod 2^130 - 5) + s modulo 2^128, without a branch.
fn finish(mut h: [u64; 3], s: u128) -> u128 {
    // Twice round, and every limb is within its bits.
    for _ in 0..2 {
        h[1] += h[0] >> 44;
        h[0] &= MASK44;
        h[2] += h[1] >> 44;
        h[1] &= MASK44;
        h[0] += (h[2] >> 42) * 5;
        h[2] &= MASK42;
    }
    h[1] += h[0] >> 44;
    h[0] &= MASK44;
    // g = h + 5 - 2^130 is the answer when it is not negative.
    let g0 = h[0] + 5;
    let g1 = h[1] + (g0 >> 44);
    let g2 = (h[2] + (g1 >> 44)).wrapping_sub(1 << 42);
    let negative = 0u64.wrapping_sub(g2 >> 63);
    let pick = |h: u64, g: u64| (h & negative) | (g & !negative);
    let h0 = pick(h[0], g0 & MASK44) as u128;
    let h1 = pick(h[1], g1 & MASK44) as u128;
    let h2 = pick(h[2], g2) as u128;
    (h0 | (h1 << 44) | (h2 << 88)).wrapping_add(s)
}

#[cfg(test)]
#[path = "../tests/unit/lanes.rs"]
mod tests;
