//! Indices against a source of randomness that repeats itself.

use super::*;

/// Gives out the same few numbers again and again.
struct Stuck(u32);

impl Entropy for Stuck {
    fn fill(&mut self, out: &mut [u8]) {
        out.copy_from_slice(&(self.0 / 3).to_ne_bytes());
        self.0 += 1;
    }
}

//@test C-IDX-1
#[test]
fn an_index_that_is_alive_is_not_given_out_again_whoever_asks() {
    let (mut indices, mut entropy) = (Indices::default(), Stuck(0));
    let given: Vec<u32> = (0..6)
        .map(|i| {
            let kind = if i % 2 == 0 { Kind::Handshake } else { Kind::Keypair };
            indices.allocate(PeerId::from_raw(i), kind, &mut entropy)
        })
        .collect();
    assert_eq!(given, [0, 1, 2, 3, 4, 5]);
    entropy.0 = 0;
    indices.free(Some(3));
    assert_eq!(indices.allocate(PeerId::from_raw(9), Kind::Keypair, &mut entropy), 3, "free again");
}

//@test C-IDX-2
//@test C-IDX-3
#[test]
fn each_kind_is_found_where_it_belongs() {
    let mut indices = Indices::default();
    let peer = PeerId::from_raw(7);
    let index = indices.allocate(peer, Kind::Handshake, &mut Stuck(0));
    let found = |i: &Indices| (i.handshake(index), i.keypair(index), i.any(index));
    assert_eq!(found(&indices), (Some(peer), None, Some(peer)));
    indices.promote(index);
    assert_eq!(found(&indices), (None, Some(peer), Some(peer)));
    indices.free(Some(index));
    assert_eq!((found(&indices), indices.len()), ((None, None, None), 0));
}
