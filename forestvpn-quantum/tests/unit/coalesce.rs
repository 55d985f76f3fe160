//! Merging by example, and against splitting: what is merged and cut again is what came.

use super::*;
use crate::batch::Frame;
use crate::offload::split::Splitter;

/// One TCP packet of a flow.
#[derive(Clone, Copy)]
struct P {
    ipv6: bool,
    port: u8,
    seq: u32,
    ack: u32,
    flags: u8,
    len: usize,
    id: u16,
    df: bool,
    ttl: u8,
}

const P0: P = P { ipv6: false, port: 1, seq: 1000, ack: 7, flags: ACK, len: 100, id: 5, df: true, ttl: 64 };

fn packet(p: &P) -> Vec<u8> {
    let ip = if p.ipv6 { 40 } else { 20 };
    let mut b = vec![0u8; ip + 32 + p.len];
    let total = b.len() as u16;
    if p.ipv6 {
        b[0] = 0x60;
        b[4..6].copy_from_slice(&(total - 40).to_be_bytes());
        b[6] = TCP;
        b[7] = p.ttl;
        (8..40).for_each(|i| b[i] = i as u8);
    } else {
        b[0] = 0x45;
        b[2..4].copy_from_slice(&total.to_be_bytes());
        b[4..6].copy_from_slice(&p.id.to_be_bytes());
        b[6] = if p.df { DF } else { 0 };
        b[8] = p.ttl;
        b[9] = TCP;
        (12..20).for_each(|i| b[i] = i as u8);
        let sum = checksum::header(&b[..20]);
        b[10..12].copy_from_slice(&sum.to_be_bytes());
    }
    b[ip] = p.port;
    b[ip + 4..ip + 8].copy_from_slice(&p.seq.to_be_bytes());
    b[ip + 8..ip + 12].copy_from_slice(&p.ack.to_be_bytes());
    b[ip + 12] = 0x80;
    b[ip + 13] = p.flags;
    (0..p.len).for_each(|i| b[ip + 32 + i] = (p.seq as usize + i) as u8);
    let addresses = if p.ipv6 { &b[8..40] } else { &b[12..20] };
    let pseudo = checksum::pseudo(addresses, TCP, total - ip as u16);
    let field = !checksum::sum(&b[ip..], pseudo);
    b[ip + 16..ip + 18].copy_from_slice(&field.to_be_bytes());
    b
}

/// Lays packets out as a receive buffer would.
fn slab(packets: &[Vec<u8>]) -> (Vec<u8>, Vec<Span>) {
    let (mut bytes, mut spans) = (Vec::new(), Vec::new());
    for p in packets {
        bytes.extend([0; 16]);
        spans.push(Span { at: bytes.len() as u32, len: p.len() as u16 });
        bytes.extend(p);
        bytes.extend([0; 16]);
    }
    (bytes, spans)
}

/// Each planned write as its virtio header and gathered bytes.
fn writes(packets: &[Vec<u8>]) -> Vec<(VnetHdr, Vec<u8>)> {
    let (mut bytes, spans) = slab(packets);
    let mut c = Coalescer::new(spans.len());
    (0..c.plan(&bytes, &spans))
        .map(|i| {
            let w = c.write(i, &mut bytes, &spans).expect("a planned write");
            (w.hdr, c.parts(&w, &spans).flat_map(|r| bytes[r].to_vec()).collect())
        })
        .collect()
}

fn cut(hdr: VnetHdr, bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut bytes = bytes.to_vec();
    let mut frame = Frame { hdr, bytes: &mut bytes };
    let s = Splitter::new(&mut frame).expect("what we merge is a sound super-packet");
    (0..s.count())
        .map(|i| {
            let mut out = vec![0; s.len(i)];
            s.write(i, &mut out).expect("the segment fits");
            out
        })
        .collect()
}

/// `n` packets that follow each other.
fn train(p: P, n: u32) -> Vec<P> {
    (0..n).map(|i| P { seq: p.seq.wrapping_add(i * p.len as u32), id: p.id + i as u16, ..p }).collect()
}

fn bytes(ps: &[P]) -> Vec<Vec<u8>> {
    ps.iter().map(packet).collect()
}

#[test]
fn a_train_becomes_one_write_and_cut_again_gives_the_same_packets() {
    for ipv6 in [false, true] {
        for start in [1000, u32::MAX - 150] {
            let mut ps = train(P { ipv6, seq: start, ..P0 }, 9);
            ps[8].len = 60;
            ps[8].flags |= PSH;
            let packets = bytes(&ps);
            let w = writes(&packets);
            assert_eq!(w.len(), 1);
            assert_eq!(w[0].0.gso_size, 100);
            assert_eq!(cut(w[0].0, &w[0].1), packets);
        }
    }
}

#[test]
fn whatever_differs_stays_alone_and_nothing_of_its_flow_overtakes_it() {
    let next = P { seq: 1100, id: 6, ..P0 };
    let third = P { seq: 1200, id: 7, ..P0 };
    type Change = fn(&mut P);
    let changes: [(&str, Change); 9] = [
        ("gap", |p| p.seq += 1),
        ("other acknowledgement", |p| p.ack = 8),
        ("FIN", |p| p.flags |= 1),
        ("ECE", |p| p.flags |= 0x40),
        ("URG", |p| p.flags |= 0x20),
        ("bigger", |p| p.len = 101),
        ("pure ACK", |p| p.len = 0),
        ("other TTL", |p| p.ttl = 63),
        ("no DF and a jump of the ID", |p| {
            p.df = false;
            p.id = 99;
        }),
    ];
    for (what, change) in changes {
        let mut odd = next;
        change(&mut odd);
        let packets = bytes(&[P0, odd, third]);
        let joined: Vec<Vec<u8>> = writes(&packets)
            .into_iter()
            .flat_map(|(hdr, b)| if hdr.gso_type == 0 { vec![b] } else { cut(hdr, &b) })
            .collect();
        assert_eq!(joined, packets, "{what}: order kept");
        assert!(writes(&packets).len() >= 2, "{what}: not merged with the first");
    }
}

#[test]
fn a_corrupt_segment_is_never_healed_by_merging() {
    //@test C-IN-8
    for bad in 0..3 {
        let mut packets = bytes(&train(P0, 3));
        packets[bad][60] ^= 1;
        let w = writes(&packets);
        assert!(w.iter().any(|(hdr, b)| hdr.gso_type == 0 && *b == packets[bad]), "written as it came");
    }
}

#[test]
fn a_shorter_segment_and_a_push_end_the_run() {
    let mut ps = train(P0, 4);
    ps[1].len = 50;
    ps[2].seq = 1150;
    ps[3].seq = 1250;
    let w = writes(&bytes(&ps));
    assert_eq!(w.len(), 2);
    let mut ps = train(P0, 4);
    ps[1].flags |= PSH;
    let w = writes(&bytes(&ps));
    assert_eq!(w.len(), 2);
}

#[test]
fn flows_merge_beside_each_other_and_each_keeps_its_order() {
    let flows: Vec<Vec<P>> = (0..6).map(|f| train(P { port: f, ..P0 }, 5)).collect();
    let mixed: Vec<P> = (0..5).flat_map(|i| flows.iter().map(move |f| f[i])).collect();
    let w = writes(&bytes(&mixed));
    assert_eq!(w.len(), 6);
    for (f, (hdr, b)) in w.iter().enumerate() {
        assert_eq!(cut(*hdr, b), bytes(&flows[f]));
    }
}

#[test]
fn a_run_stops_before_the_length_field_overflows() {
    let w = writes(&bytes(&train(P { len: 1368, ..P0 }, 100)));
    assert!(w.len() >= 3);
    assert!(w.iter().all(|(_, b)| b.len() <= 65_535));
    let many = writes(&bytes(&train(P { len: 8, ..P0 }, 200)));
    assert!(many.len() >= 200 / MAX_PARTS);
}

#[test]
fn other_protocols_and_odd_packets_pass_singly_in_order() {
    let mut udp = packet(&P0);
    udp[9] = 17;
    let mut fragment = packet(&P { seq: 1100, id: 6, ..P0 });
    fragment[6] = 0x20;
    let packets =
        vec![packet(&P0), udp, fragment, packet(&P { seq: 1200, id: 7, ..P0 }), vec![0x45; 10], vec![]];
    let w = writes(&packets);
    assert_eq!(w.len(), packets.len());
    assert!(w.iter().zip(&packets).all(|((hdr, b), p)| hdr.gso_type == 0 && b == p));
}

#[test]
fn a_refused_run_can_be_written_singly_unchanged() {
    for ipv6 in [false, true] {
        let mut ps = train(P { ipv6, ..P0 }, 5);
        ps[4].flags |= PSH;
        let packets = bytes(&ps);
        let (mut b, spans) = slab(&packets);
        let mut c = Coalescer::new(spans.len());
        assert_eq!(c.plan(&b, &spans), 1);
        let w = c.write(0, &mut b, &spans).expect("the run");
        c.split_up(&w, &mut b, &spans);
        let single: Vec<Vec<u8>> = c.members(0).map(|i| b[range(&spans[i])].to_vec()).collect();
        assert_eq!(single, packets);
    }
}

/// A UDP packet of the flow of `port`; `sum` false: without a checksum.
fn datagram(ipv6: bool, port: u8, id: u16, len: usize, sum: bool) -> Vec<u8> {
    let ip = if ipv6 { 40 } else { 20 };
    let mut b = packet(&P { ipv6, id, len: 0, ..P0 })[..ip].to_vec();
    let part = (8 + len) as u16;
    if ipv6 {
        b[6] = UDP;
        b[4..6].copy_from_slice(&part.to_be_bytes());
    } else {
        b[9] = UDP;
        b[2..4].copy_from_slice(&(20 + part).to_be_bytes());
        b[10..12].fill(0);
        let header = checksum::header(&b);
        b[10..12].copy_from_slice(&header.to_be_bytes());
    }
    b.extend([port, 0, 0, 53]);
    b.extend(part.to_be_bytes());
    b.extend([0, 0]);
    b.extend((0..len).map(|i| (i as u16 * 7 + id) as u8));
    if sum {
        let pseudo = checksum::pseudo(if ipv6 { &b[8..40] } else { &b[12..20] }, UDP, part);
        let field = checksum::wire_form(!checksum::sum(&b[ip..], pseudo), 6);
        b[ip + 6..ip + 8].copy_from_slice(&field.to_be_bytes());
    }
    b
}

/// Each planned write, with UDP joined.
fn writes_with_udp(packets: &[Vec<u8>]) -> Vec<(VnetHdr, Vec<u8>)> {
    let (mut bytes, spans) = slab(packets);
    let mut c = Coalescer::new(spans.len());
    c.set_udp(true);
    (0..c.plan(&bytes, &spans))
        .map(|i| {
            let w = c.write(i, &mut bytes, &spans).expect("a planned write");
            (w.hdr, c.parts(&w, &spans).flat_map(|r| bytes[r].to_vec()).collect())
        })
        .collect()
}

#[test]
fn datagrams_of_a_flow_and_size_are_joined_when_asked_for_and_cut_again_they_are_the_same() {
    for ipv6 in [false, true] {
        let mut packets: Vec<_> = (0..9).map(|i| datagram(ipv6, 1, 5 + i, 100, true)).collect();
        packets.push(datagram(ipv6, 1, 14, 60, true));
        assert_eq!(writes(&packets).len(), 10, "not without being asked");
        let w = writes_with_udp(&packets);
        assert_eq!(w.len(), 1);
        assert_eq!((w[0].0.gso_type, w[0].0.gso_size, w[0].0.csum_offset), (VnetHdr::GSO_UDP_L4, 100, 6));
        assert_eq!(cut(w[0].0, &w[0].1), packets);
        // And a refused one comes apart into what came.
        let (mut b, spans) = slab(&packets);
        let mut c = Coalescer::new(spans.len());
        c.set_udp(true);
        assert_eq!(c.plan(&b, &spans), 1);
        let w = c.write(0, &mut b, &spans).expect("the run");
        c.split_up(&w, &mut b, &spans);
        let single: Vec<Vec<u8>> = c.members(0).map(|i| b[range(&spans[i])].to_vec()).collect();
        assert_eq!(single, packets);
    }
}

#[test]
fn datagrams_that_differ_stay_alone_and_none_of_their_flow_overtakes_them() {
    let plain = |id, len| datagram(false, 1, id, len, true);
    let mut corrupt = plain(6, 100);
    corrupt[60] ^= 1;
    let mut wrong_length = plain(6, 100);
    wrong_length[25] -= 1;
    let mut fragment = plain(6, 100);
    fragment[6] = 0x20;
    let cases = [
        ("a longer one", plain(6, 101), vec![1, 2]),
        ("no checksum", datagram(false, 1, 6, 100, false), vec![1, 1, 1]),
        ("corrupt", corrupt, vec![1, 1, 1]),
        ("a length that is not its own", wrong_length, vec![1, 1, 1]),
        ("a fragment", fragment, vec![1, 1, 1]),
        ("empty", plain(6, 0), vec![1, 1, 1]),
        ("shorter: it ends the run", plain(6, 50), vec![2, 1]),
        ("another flow", datagram(false, 2, 6, 100, true), vec![2, 1]),
        ("TCP from the same port", packet(&P { id: 6, ..P0 }), vec![2, 1]),
    ];
    for (name, odd, expected) in cases {
        let last = plain(7, if name == "a longer one" { 101 } else { 100 });
        let packets = [plain(5, 100), odd, last];
        let w = writes_with_udp(&packets);
        let counts: Vec<_> =
            w.iter().map(|(hdr, b)| if hdr.gso_size == 0 { 1 } else { cut(*hdr, b).len() }).collect();
        assert_eq!(counts, expected, "{name}");
    }
}
