//! Header fields of packets that only a dishonest peer sends.

use super::*;

//@test C-IN-3
#[test]
fn what_is_no_ip_packet_has_no_length_and_no_address() {
    let v4 = |claimed: u16, len: usize| {
        let mut p = vec![0; len];
        p[0] = 0x45;
        p[2..4].copy_from_slice(&claimed.to_be_bytes());
        p
    };
    let mut v6 = vec![0; 64];
    v6[0] = 0x60;
    assert_eq!(length(&v4(20, 32)), Some(20));
    assert_eq!(length(&v4(20, 20)), Some(20));
    assert_eq!(length(&v4(20, 19)), None, "shorter than a header");
    assert_eq!(length(&v4(19, 32)), None, "a total length below the header's");
    assert_eq!(length(&v4(33, 32)), None, "longer than what is there");
    assert_eq!(length(&v6), Some(40));
    assert_eq!(length(&v6[..39]), None);
    v6[4..6].copy_from_slice(&65_535_u16.to_be_bytes());
    assert_eq!(length(&v6), None, "65535 + 40 does not wrap");
    let mut huge = vec![0; 65_575];
    huge[0] = 0x60;
    huge[4..6].copy_from_slice(&[255; 2]);
    assert_eq!(length(&huge), Some(65_575));
    for version in [0, 1, 2, 3, 5, 7, 8, 15] {
        let mut p = v4(20, 64);
        p[0] = version << 4 | 5;
        assert_eq!((length(&p), source(&p), destination(&p)), (None, None, None), "version {version}");
        let before = p.clone();
        decapsulate(&mut p, Ecn::Ce);
        assert_eq!(p, before);
    }
    assert_eq!((length(&[]), source(&[]), destination(&[])), (None, None, None));
}
