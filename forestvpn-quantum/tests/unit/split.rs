//! Splitting against a naive model: every field of every segment.

use super::*;
use crate::offload::checksum;

/// The sum as RFC 1071 writes it, two bytes at a time.
fn naive(bytes: &[u8], start: u32) -> u16 {
    let mut acc = start;
    for pair in bytes.chunks(2) {
        acc += u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
        acc = (acc & 0xffff) + (acc >> 16);
    }
    acc as u16
}

#[test]
fn the_fast_sum_equals_the_naive_one_at_every_length_and_alignment() {
    let bytes: Vec<u8> = (0..2000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    for start in 0..4 {
        for len in (0..200).chain([1419, 1420, 1500]) {
            let part = &bytes[start..start + len];
            for seed in [0u16, 1, 0xfffe, 0xffff] {
                assert_eq!(checksum::sum(part, seed), naive(part, seed.into()), "{start}+{len}, seed {seed}");
            }
        }
    }
    assert_eq!(checksum::sum(&[0xff; 65535], 0xffff), naive(&[0xff; 65535], 0xffff));
}

struct Shape {
    ipv6: bool,
    protocol: u8,
    /// IPv6 extension header bytes, or TCP option bytes.
    options: usize,
    extension: bool,
    flags: u8,
    payload: usize,
    size: u16,
}

/// A super-packet as the kernel makes it: the checksum field holds the pseudo-header sum.
fn super_packet(s: &Shape) -> (VnetHdr, Vec<u8>) {
    let extension = if s.extension { 8 } else { 0 };
    let transport = if s.ipv6 { 40 + extension } else { 20 };
    let header = if s.protocol == TCP { 20 + s.options } else { 8 };
    let total = transport + header + s.payload;
    let mut p = vec![0u8; total];
    if s.ipv6 {
        p[0] = 0x60;
        p[4..6].copy_from_slice(&((total - 40).min(65535) as u16).to_be_bytes());
        p[6] = if s.extension { 60 } else { s.protocol };
        p[7] = 64;
        (8..40).for_each(|i| p[i] = i as u8);
        if s.extension {
            p[40] = s.protocol;
        }
    } else {
        p[0] = 0x45;
        p[1] = 2;
        p[2..4].copy_from_slice(&(total as u16).to_be_bytes());
        p[4..6].copy_from_slice(&0xfff0u16.to_be_bytes());
        p[6] = 0x40;
        p[8] = 64;
        p[9] = s.protocol;
        (12..20).for_each(|i| p[i] = i as u8);
    }
    p[transport..transport + 4].copy_from_slice(&[0x13, 0x88, 0x1f, 0x90]);
    if s.protocol == TCP {
        p[transport + 4..transport + 8].copy_from_slice(&0xffff_ff00u32.to_be_bytes());
        p[transport + 12] = ((header / 4) as u8) << 4;
        p[transport + 13] = s.flags;
        p[transport + 20..transport + header].fill(1);
    }
    (0..s.payload).for_each(|i| p[transport + header + i] = (i * 7 + i / 251) as u8);
    let gso_type = match (s.protocol, s.ipv6) {
        (UDP, _) => VnetHdr::GSO_UDP_L4,
        (_, false) => VnetHdr::GSO_TCPV4,
        (_, true) => VnetHdr::GSO_TCPV6,
    };
    let csum_offset = if s.protocol == TCP { 16 } else { 6 };
    let hdr = VnetHdr {
        flags: VnetHdr::NEEDS_CSUM,
        gso_type,
        hdr_len: 14,
        gso_size: s.size,
        csum_start: transport as u16,
        csum_offset,
    };
    (hdr, p)
}

fn split(hdr: VnetHdr, packet: &[u8]) -> Result<Vec<Vec<u8>>, Discard> {
    let mut bytes = packet.to_vec();
    let mut frame = Frame { hdr, bytes: &mut bytes };
    let splitter = Splitter::new(&mut frame)?;
    Ok((0..splitter.count())
        .map(|i| {
            let mut out = vec![0xee; splitter.len(i)];
            splitter.write(i, &mut out).expect("the segment fits");
            out
        })
        .collect())
}

#[test]
fn each_segment_has_the_lengths_ids_sequence_numbers_flags_and_checksums_the_kernel_would_give_it() {
    let shape = |ipv6, protocol, options, extension, payload, size| Shape {
        ipv6,
        protocol,
        options,
        extension,
        flags: 0x10 | FIN | PSH | CWR,
        payload,
        size,
    };
    let shapes = [
        shape(false, TCP, 12, false, 64_000, 1368),
        shape(false, TCP, 0, false, 2737, 1368),
        shape(false, TCP, 0, false, 20_000, 88),
        shape(true, TCP, 12, false, 60_001, 1348),
        shape(true, TCP, 0, true, 5000, 1340),
        shape(false, UDP, 0, false, 30_000, 1200),
        shape(true, UDP, 0, false, 30_001, 1200),
        shape(true, UDP, 0, true, 3001, 1000),
    ];
    for s in shapes {
        let (hdr, packet) = super_packet(&s);
        let transport = usize::from(hdr.csum_start);
        let headers = transport + if s.protocol == TCP { 20 + s.options } else { 8 };
        let segments = split(hdr, &packet).expect("a sound super-packet");
        assert_eq!(segments.len(), s.payload.div_ceil(usize::from(s.size)));
        let mut joined = Vec::new();
        for (i, seg) in segments.iter().enumerate() {
            let last = i + 1 == segments.len();
            if s.ipv6 {
                assert_eq!(usize::from(u16_at(seg, 4)) + 40, seg.len());
            } else {
                assert_eq!(usize::from(u16_at(seg, 2)), seg.len());
                assert_eq!(u16_at(seg, 4), 0xfff0u16.wrapping_add(i as u16), "IPv4 id counts up");
                assert_eq!(naive(&seg[..20], 0), 0xffff, "IPv4 header checksum");
            }
            let part = &seg[transport..];
            let addresses = if s.ipv6 { &seg[8..40] } else { &seg[12..20] };
            let pseudo = naive(addresses, u32::from(s.protocol) + part.len() as u32);
            assert_eq!(naive(part, pseudo.into()), 0xffff, "transport checksum of segment {i}");
            if s.protocol == TCP {
                let seq = u32::from_be_bytes(crate::wire::array_at(part, 4));
                assert_eq!(seq, 0xffff_ff00u32.wrapping_add(joined.len() as u32));
                assert_eq!(part[13] & (FIN | PSH) != 0, last, "FIN and PSH on the last only");
                assert_eq!(part[13] & CWR != 0, i == 0, "CWR on the first only");
            } else {
                assert_eq!(usize::from(u16_at(part, 4)), part.len());
                assert_ne!(u16_at(part, 6), 0, "a UDP checksum of zero would mean none");
            }
            joined.extend_from_slice(&seg[headers..]);
        }
        assert_eq!(joined, packet[headers..], "every payload byte once, in order");
    }
}

#[test]
fn a_description_that_contradicts_the_packet_is_refused() {
    let sound = Shape {
        ipv6: false,
        protocol: TCP,
        options: 0,
        extension: false,
        flags: 0x10,
        payload: 3000,
        size: 1000,
    };
    let (hdr, packet) = super_packet(&sound);
    assert!(split(hdr, &packet).is_ok());
    let bad = [
        VnetHdr { gso_size: 0, ..hdr },
        VnetHdr { flags: 0, ..hdr },
        VnetHdr { csum_offset: 6, ..hdr },
        VnetHdr { csum_start: 24, ..hdr },
        VnetHdr { csum_start: 0, ..hdr },
        VnetHdr { csum_start: 60_000, ..hdr },
        VnetHdr { gso_type: VnetHdr::GSO_TCPV6, ..hdr },
        VnetHdr { gso_type: 99, ..hdr },
    ];
    for hdr in bad {
        assert_eq!(split(hdr, &packet).err(), Some(Discard::BadOffload), "{hdr:?}");
    }
    for cut in [0, 1, 19, 20, 39, 40] {
        assert_eq!(split(hdr, &packet[..cut]).err(), Some(Discard::BadOffload), "cut to {cut}");
    }
    let mut short_header = packet.clone();
    short_header[32] = 0x10;
    assert!(split(hdr, &short_header).is_err(), "a TCP header of 4 bytes");
    let mut long_header = packet;
    long_header[32] = 0xf0;
    assert!(split(hdr, &long_header[..70]).is_err(), "a TCP header beyond the packet");
}

#[test]
fn a_plain_packet_is_one_segment_and_gets_the_checksum_it_lacks() {
    let s =
        Shape { ipv6: false, protocol: UDP, options: 0, extension: false, flags: 0, payload: 99, size: 1 };
    let (hdr, mut packet) = super_packet(&s);
    let part = packet.len() as u16 - 20;
    packet[24..26].copy_from_slice(&part.to_be_bytes());
    let partial = checksum::pseudo(&packet[12..20], UDP, part);
    packet[26..28].copy_from_slice(&partial.to_be_bytes());
    let hdr = VnetHdr { gso_type: VnetHdr::GSO_NONE, gso_size: 0, ..hdr };
    let segments = split(hdr, &packet).expect("a plain packet");
    assert_eq!(segments.len(), 1);
    let pseudo = naive(&packet[12..20], u32::from(UDP) + u32::from(part));
    assert_eq!(naive(&segments[0][20..], pseudo.into()), 0xffff);
    assert_eq!(segments[0][28..], packet[28..]);
    let untouched = split(VnetHdr::default(), &packet).expect("a plain packet");
    assert_eq!(untouched, [packet.clone()]);
    assert!(split(VnetHdr { csum_start: 118, ..hdr }, &packet[..119]).is_err(), "no room for the field");
}
