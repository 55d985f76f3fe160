//! The option of SYN packets, against a plain reading of RFC 9293 and checksums summed anew.

use proptest::prelude::*;

use super::*;
use crate::offload::checksum::{pseudo, sum, valid};

const SYN_ACK: u8 = 0x12;
const ACK: u8 = 0x10;

/// A TCP packet with these flags, options (padded with NOPs) and payload; its checksum is right.
fn packet(ipv6: bool, flags: u8, options: &[u8], payload: &[u8]) -> Vec<u8> {
    let options = [options, &[1; 3][..(4 - options.len() % 4) % 4]].concat();
    let mut tcp = vec![0x12, 0x34, 0, 80, 1, 2, 3, 4, 5, 6, 7, 8, 0, flags, 0xff, 0xff, 0, 0, 0, 0];
    tcp[12] = (((HEADER + options.len()) / 4) << 4) as u8;
    tcp.extend([&options, payload].concat());
    let len = tcp.len() as u16;
    let (mut packet, addresses) = if ipv6 {
        let mut head = vec![0x60, 0, 0, 0, 0, 0, 6, 64];
        head[4..6].copy_from_slice(&len.to_be_bytes());
        head.extend((0..32).map(|n| n * 7));
        (head, 8..40)
    } else {
        let mut head = vec![0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 1, 2, 3, 10, 4, 5, 6];
        head[2..4].copy_from_slice(&(len + 20).to_be_bytes());
        (head, 12..20)
    };
    let start = pseudo(&packet[addresses], 6, len);
    let field = !sum(&tcp, start);
    tcp[CHECKSUM..CHECKSUM + 2].copy_from_slice(&field.to_be_bytes());
    packet.extend(tcp);
    packet
}

fn is_valid(packet: &[u8]) -> bool {
    let (at, addresses) = if packet[0] >> 4 == 6 { (40, 8..40) } else { (20, 12..20) };
    valid(&packet[at..], pseudo(&packet[addresses], 6, (packet.len() - at) as u16))
}

const fn value(mss: u16) -> [u8; 4] {
    let [high, low] = mss.to_be_bytes();
    [2, 4, high, low]
}

fn clamped(packet: &[u8], mss: Mss, mtu: u16) -> Vec<u8> {
    let mut packet = packet.to_vec();
    clamp(&mut packet, mss, mtu, false);
    packet
}

#[test]
fn the_ends_of_a_connection_are_told_what_fits_the_tunnel_in_both_families() {
    for (ipv6, fits) in [(false, 1380), (true, 1360)] {
        for flags in [SYN, SYN_ACK] {
            let syn = packet(ipv6, flags, &value(1460), &[]);
            assert_eq!(clamped(&syn, Mss::Auto, 1420), packet(ipv6, flags, &value(fits), &[]));
            assert_eq!(clamped(&syn, Mss::Most(1000), 1420), packet(ipv6, flags, &value(1000), &[]));
            assert_eq!(clamped(&syn, Mss::Most(3), 1420), packet(ipv6, flags, &value(64), &[]));
        }
    }
}

#[test]
fn a_smaller_value_other_packets_and_everything_while_it_is_off_stay_as_they_are() {
    for ipv6 in [false, true] {
        let small = packet(ipv6, SYN, &value(1380 - 20 * u16::from(ipv6)), &[]);
        assert_eq!(clamped(&small, Mss::Auto, 1420), small);
        let syn = packet(ipv6, SYN, &value(1460), &[]);
        assert_eq!(clamped(&syn, Mss::Off, 1280), syn);
        let later = packet(ipv6, ACK, &value(1460), b"data");
        assert_eq!(clamped(&later, Mss::Auto, 1280), later);
        let without = packet(ipv6, SYN, &[4, 2, 1, 3, 3, 7], &[]);
        assert_eq!(clamped(&without, Mss::Auto, 1280), without);
        let mut udp = syn.clone();
        udp[if ipv6 { 6 } else { 9 }] = 17;
        assert_eq!(clamped(&udp, Mss::Auto, 1280), udp);
    }
    let mut fragment = packet(false, SYN, &value(1460), &[]);
    fragment[7] = 1;
    assert_eq!(clamped(&fragment, Mss::Auto, 1280), fragment);
}

#[test]
fn an_option_that_lies_about_its_length_ends_the_search_and_what_is_cut_off_is_not_read() {
    for options in
        [&[8, 0, 2, 4, 5, 180][..], &[8, 1, 2, 4, 5, 180], &[8, 200, 2, 4, 5, 180], &[0, 2, 4, 5, 180]]
    {
        let syn = packet(false, SYN, options, &[]);
        assert_eq!(clamped(&syn, Mss::Auto, 600), syn, "{options:?}");
    }
    let syn = packet(true, SYN, &value(1460), &[]);
    for end in 0..syn.len() {
        assert_eq!(clamped(&syn[..end], Mss::Auto, 600), &syn[..end], "{end}");
    }
}

#[test]
fn a_checksum_that_the_kernel_left_to_us_is_not_touched() {
    let mut syn = packet(false, SYN, &value(1460), &[]);
    let field = syn[20 + CHECKSUM..][..2].to_vec();
    clamp(&mut syn, Mss::Most(1000), 1420, true);
    assert_eq!(syn[40..44], value(1000));
    assert_eq!(syn[20 + CHECKSUM..][..2], field);
}

proptest! {
    /// Whatever stands before and after the option, even or odd its place.
    #[test]
    fn only_the_value_changes_and_the_checksum_stays_right(
        ipv6: bool,
        before in proptest::collection::vec(prop_oneof![
            Just(vec![1]), Just(vec![4, 2]), Just(vec![3, 3, 7]), Just(vec![8, 10, 1, 2, 3, 4, 5, 6, 7, 8]),
            any::<[u8; 3]>().prop_map(|b| vec![254, 5, b[0], b[1], b[2]]),
        ], 0..4),
        said: u16, most in 64_u16.., payload in proptest::collection::vec(any::<u8>(), 0..40),
    ) {
        let head = before.concat();
        prop_assume!(head.len() <= 36);
        let old = packet(ipv6, SYN, &[&head[..], &value(said)].concat(), &payload);
        let new = clamped(&old, Mss::Most(most), 1420);
        prop_assert!(is_valid(&old) && is_valid(&new));
        let (at, sum) = (if ipv6 { 60 } else { 40 } + head.len() + 2, if ipv6 { 40 } else { 20 } + CHECKSUM);
        let agreed = u16_at(&new, at);
        prop_assert_eq!(agreed, said.min(most));
        for i in (0..old.len()).filter(|i| !(at..at + 2).contains(i) && !(sum..sum + 2).contains(i)) {
            prop_assert_eq!(old[i], new[i]);
        }
    }

    #[test]
    fn nothing_that_comes_makes_it_fail(mut bytes in proptest::collection::vec(any::<u8>(), 0..120), v6: bool, most: u16) {
        if let Some(first) = bytes.first_mut() {
            *first = if v6 { 0x60 } else { 0x40 | (*first & 15) };
        }
        for at in [6, 9] {
            if let Some(protocol) = bytes.get_mut(at) {
                *protocol = 6;
            }
        }
        if let Some(offset) = bytes.get_mut(7).filter(|_| !v6) {
            *offset = 0;
        }
        let len = bytes.len();
        clamp(&mut bytes, Mss::Most(most), 1420, false);
        prop_assert_eq!(bytes.len(), len);
    }
}
